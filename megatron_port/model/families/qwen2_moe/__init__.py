"""Qwen1.5-MoE and Qwen2-MoE: Qwen2's layer with experts, and a block beside them whose share is learned."""

from megatron_port.model.families.family import Family
from megatron_port.model.families.moe_like import HARMLESS
from megatron_port.model.families.qwen2_moe.config import read, write
from megatron_port.model.families.qwen2_moe.names import NAMES

FAMILY = Family(
    name="qwen2_moe", architecture="Qwen2MoeForCausalLM", read=read, write=write, names=NAMES, harmless=HARMLESS
)
