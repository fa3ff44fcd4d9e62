"""Qwen3 (dense): Llama's layer with an RMSNorm of each query and key head."""

from megatron_port.model.families.family import Family
from megatron_port.model.families.qwen3.config import read, write
from megatron_port.model.families.qwen3.names import NAMES

FAMILY = Family(name="qwen3", architecture="Qwen3ForCausalLM", read=read, write=write, names=NAMES)
