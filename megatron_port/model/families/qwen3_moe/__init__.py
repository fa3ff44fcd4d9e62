"""Qwen3-MoE: Qwen3's layer with experts."""

from megatron_port.model.families.family import Family
from megatron_port.model.families.moe_like import HARMLESS
from megatron_port.model.families.qwen3_moe.config import read, write
from megatron_port.model.families.qwen3_moe.names import NAMES

FAMILY = Family(
    name="qwen3_moe", architecture="Qwen3MoeForCausalLM", read=read, write=write, names=NAMES,
    harmless=HARMLESS | {"max_window_layers"},
)
