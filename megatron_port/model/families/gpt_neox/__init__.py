"""GPT-NeoX: partial rotary positions, LayerNorm, GeLU, attention and feed-forward in parallel."""

from megatron_port.model.families.family import Family
from megatron_port.model.families.gpt_neox.config import HARMLESS, read, write
from megatron_port.model.families.gpt_neox.names import NAMES

FAMILY = Family(
    name="gpt_neox", architecture="GPTNeoXForCausalLM", read=read, write=write, names=NAMES, harmless=HARMLESS
)
