"""Qwen3's config.json."""

from __future__ import annotations

from typing import Any

from megatron_port.config.schema import ModelConfig
from megatron_port.model.families.fields import Fields
from megatron_port.model.families.llama_like import read_llama_like, write_llama_like

HARMLESS = frozenset({"sliding_window", "max_window_layers"})
"""Read by transformers only where use_sliding_window is true, which is refused."""


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model."""
    f.refuse("attention_bias", False, "biases in attention alone")
    f.refuse("use_sliding_window", False, "attention over a window")
    values = read_llama_like(f, ffn=22016, vocab=151936, length=32768, groups=32, head=128)
    f.refuse("layer_types", ["full_attention"] * values["num_layers"], "attention over a window")
    return values | {"add_bias": False, "qk_norm": True}


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    return write_llama_like(model) | {"attention_bias": False, "use_sliding_window": False}
