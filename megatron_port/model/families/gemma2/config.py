"""Gemma 2's config.json."""

from __future__ import annotations

from typing import Any

from megatron_port.config.schema import ModelConfig
from megatron_port.model.families.fields import Fields, rope_scaling
from megatron_port.model.families.gemma_like import read_gemma_like, write_gemma_like


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model."""
    types = ("sliding_attention", "full_attention")
    values = read_gemma_like(f, vocab=256000, length=8192, types=types, caps=(50.0, 30.0))
    return values | f.rope("rope_theta", 1.0)


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    return write_gemma_like(model) | rope_scaling(model)
