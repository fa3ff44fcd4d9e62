"""Qwen3-MoE's names: Qwen3's, and those of experts."""

from dataclasses import replace

from megatron_port.model.families.moe_like import USUAL
from megatron_port.model.families.qwen3.names import NAMES as QWEN3

NAMES = replace(QWEN3, inside={**QWEN3.inside, **USUAL})
