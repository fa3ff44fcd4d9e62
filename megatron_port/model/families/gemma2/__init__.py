"""Gemma 2: norms at both ends of a branch, GeGLU, bounded scores and logits, a window in every other layer."""

from megatron_port.model.families.family import Family
from megatron_port.model.families.gemma2.config import read, write
from megatron_port.model.families.gemma2.names import NAMES
from megatron_port.model.families.gemma_like import HARMLESS

FAMILY = Family(
    name="gemma2", architecture="Gemma2ForCausalLM", read=read, write=write, names=NAMES, harmless=HARMLESS
)
