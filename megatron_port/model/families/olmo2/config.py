"""OLMo 2's config.json."""

from __future__ import annotations

from typing import Any

from megatron_port.config.schema import ModelConfig
from megatron_port.model.families.fields import Fields
from megatron_port.model.families.llama_like import read_llama_like, write_llama_like


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model."""
    f.refuse("attention_bias", False, "biases in attention alone")
    return read_llama_like(f, vocab=50304, epsilon=1e-5) | {
        "add_bias": False, "norm_placement": "post", "qk_norm": True, "qk_norm_over": "projection",
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    return write_llama_like(model) | {"attention_bias": False}
