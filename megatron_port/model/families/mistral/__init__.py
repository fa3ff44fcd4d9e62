"""Mistral without a window: Llama's model, exported as Mistral."""

from megatron_port.model.families.family import Family
from megatron_port.model.families.llama.names import NAMES
from megatron_port.model.families.mistral.config import read, write

FAMILY = Family(
    name="mistral", architecture="MistralForCausalLM", read=read, write=write, names=NAMES, twin=True
)
