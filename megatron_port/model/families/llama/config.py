"""Llama's config.json."""

from __future__ import annotations

from typing import Any

from megatron_port.config.schema import ModelConfig
from megatron_port.model.families.fields import Fields
from megatron_port.model.families.llama_like import one_bias, read_llama_like, write_llama_like


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model."""
    return read_llama_like(f) | {"add_bias": one_bias(f)}


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    return write_llama_like(model) | {"attention_bias": model.add_bias, "mlp_bias": model.add_bias}
