"""Phi-3 and Phi-4: Llama's layer; queries, keys and values in one matrix, gate and up in another."""

from megatron_port.model.families.family import Family
from megatron_port.model.families.phi3.config import HARMLESS, read, write
from megatron_port.model.families.phi3.names import NAMES

FAMILY = Family(
    name="phi3", architecture="Phi3ForCausalLM", read=read, write=write, names=NAMES, harmless=HARMLESS, twin=True
)
