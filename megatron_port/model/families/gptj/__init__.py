"""GPT-J: neighbouring elements of a head rotate, one LayerNorm for attention and feed-forward in parallel."""

from megatron_port.model.families.family import Family
from megatron_port.model.families.gptj.config import HARMLESS, read, write
from megatron_port.model.families.gptj.names import NAMES

FAMILY = Family(name="gptj", architecture="GPTJForCausalLM", read=read, write=write, names=NAMES, harmless=HARMLESS)
