"""Llama: rotary positions, RMSNorm, SwiGLU, grouped queries."""

from megatron_port.model.families.family import Family
from megatron_port.model.families.llama.config import read, write
from megatron_port.model.families.llama.names import NAMES

FAMILY = Family(
    name="llama", architecture="LlamaForCausalLM", read=read, write=write, names=NAMES,
    harmless=frozenset({"pretraining_tp"}),  # the same products, in slices
)
