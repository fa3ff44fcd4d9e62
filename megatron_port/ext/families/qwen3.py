"""Qwen3 (dense): Llama's layer with an RMSNorm of each query and key head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families.family import Family, Fields, windows_by_layer_there
from megatron_port.ext.families.llama import NAMES as LLAMA
from megatron_port.ext.families.shared import read_llama_like, write_llama_like


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model."""
    f.refuse("attention_bias", False, "biases in attention alone")
    values = read_llama_like(f, ffn=22016, vocab=151936, length=32768, groups=32, head=128)
    values |= f.windows_by_layer(values["num_layers"])
    return values | {"add_bias": False, "qk_norm": True}


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    return write_llama_like(model) | {"attention_bias": False} | windows_by_layer_there(model)


# Qwen3's names: Llama's, and the norms of query and key heads.

_NORMS = {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}
NAMES = replace(LLAMA, inside={**LLAMA.inside, **_NORMS}, buffers=())


FAMILY = Family(name="qwen3", architecture="Qwen3ForCausalLM", read=read, write=write, names=NAMES)
