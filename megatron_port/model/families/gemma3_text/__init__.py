"""Gemma 3 (text): Gemma 2's layer with normed heads in place of bounded scores, windows in five of six layers."""

from megatron_port.model.families.family import Family
from megatron_port.model.families.gemma3_text.config import HARMLESS, read, write
from megatron_port.model.families.gemma3_text.names import NAMES

FAMILY = Family(
    name="gemma3_text", architecture="Gemma3ForCausalLM", read=read, write=write, names=NAMES, harmless=HARMLESS
)
