"""Qwen2 and Qwen2.5: Llama's layer with biases of queries, keys and values."""

from __future__ import annotations

from typing import Any

from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families.family import Family, Fields, windows_by_layer_there
from megatron_port.ext.families.llama import NAMES
from megatron_port.ext.families.shared import read_llama_like, write_llama_like


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model."""
    values = read_llama_like(f, ffn=22016, vocab=151936, length=32768, groups=32)
    values |= f.windows_by_layer(values["num_layers"])
    return values | {"add_bias": False, "qkv_bias": True}


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    return write_llama_like(model) | windows_by_layer_there(model)


FAMILY = Family(name="qwen2", architecture="Qwen2ForCausalLM", read=read, write=write, names=NAMES)
