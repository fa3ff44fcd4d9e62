"""OLMo 2: Llama's matrices, norms of what the branches add, RMSNorm over all queries and over all keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families.family import Family, Fields
from megatron_port.ext.families.qwen3 import NAMES as QWEN3
from megatron_port.ext.families.shared import read_llama_like, write_llama_like


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model."""
    f.refuse("attention_bias", False, "biases in attention alone")
    return read_llama_like(f, vocab=50304, epsilon=1e-5) | {
        "add_bias": False, "norm_placement": "post", "qk_norm": True, "qk_norm_over": "projection",
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    return write_llama_like(model) | {"attention_bias": False}


# OLMo 2's names: Llama's, without norms of what attention and MLP read.

_NORMS = {"post_norm1": "post_attention_layernorm", "post_norm2": "post_feedforward_layernorm"}
_INSIDE = {ours: theirs for ours, theirs in QWEN3.inside.items() if ours not in ("norm1", "norm2")}
NAMES = replace(QWEN3, inside={**_INSIDE, **_NORMS})


FAMILY = Family(name="olmo2", architecture="Olmo2ForCausalLM", read=read, write=write, names=NAMES)
