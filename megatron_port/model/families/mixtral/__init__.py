"""Mixtral: Mistral's layer with experts, softmax over those that are chosen."""

from megatron_port.model.families.family import Family
from megatron_port.model.families.mixtral.config import read, write
from megatron_port.model.families.mixtral.names import NAMES
from megatron_port.model.families.moe_like import HARMLESS

FAMILY = Family(
    name="mixtral", architecture="MixtralForCausalLM", read=read, write=write, names=NAMES, harmless=HARMLESS
)
