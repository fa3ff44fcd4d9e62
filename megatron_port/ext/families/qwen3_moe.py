"""Qwen3-MoE: Qwen3's layer with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families.family import Family, Fields
from megatron_port.ext.families.qwen3 import NAMES as QWEN3
from megatron_port.ext.families.shared import (
    MOE_HARMLESS,
    USUAL,
    qwen_experts,
    qwen_experts_there,
    read_llama_like,
    write_llama_like,
)


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model. A window is of all layers."""
    f.refuse("attention_bias", False, "biases in attention alone")
    values = read_llama_like(f, hidden=2048, ffn=6144, vocab=151936, length=32768, groups=4, layers=24)
    window = f.window("sliding_window", 4096)
    return values | {
        "add_bias": False, "qk_norm": True, "sliding_window": window if f.get("use_sliding_window", False) else 0,
        "moe": qwen_experts(f, values["num_layers"], experts=128, top_k=8, width=768),
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    return write_llama_like(model) | qwen_experts_there(model) | {
        "attention_bias": False, "use_sliding_window": model.sliding_window > 0,
        "sliding_window": model.sliding_window or None,
    }


# Qwen3-MoE's names: Qwen3's, and those of experts.

NAMES = replace(QWEN3, inside={**QWEN3.inside, **USUAL})


FAMILY = Family(
    name="qwen3_moe", architecture="Qwen3MoeForCausalLM", read=read, write=write, names=NAMES,
    harmless=MOE_HARMLESS | {"max_window_layers"},
)
