"""Mistral without a window: Llama's model, exported as Mistral."""

from __future__ import annotations

from typing import Any

from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families.family import Family, Fields
from megatron_port.ext.families.llama import NAMES
from megatron_port.ext.families.shared import read_llama_like, write_llama_like


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model."""
    values = read_llama_like(f, ffn=14336, vocab=32000, length=4096 * 32, groups=8)
    window = f.window("sliding_window", 4096)
    return values | {"add_bias": False, "sliding_window": window}


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    return write_llama_like(model) | {"sliding_window": model.sliding_window or None}


FAMILY = Family(
    name="mistral", architecture="MistralForCausalLM", read=read, write=write, names=NAMES, twin=True
)
