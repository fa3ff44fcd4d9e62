"""GPT-2: learned positions, LayerNorm, GeLU, biases everywhere, tied ends."""

from megatron_port.model.families.family import Family
from megatron_port.model.families.gpt2.config import HARMLESS, read, write
from megatron_port.model.families.gpt2.names import NAMES

FAMILY = Family(
    name="gpt2", architecture="GPT2LMHeadModel", read=read, write=write, names=NAMES, harmless=HARMLESS
)
