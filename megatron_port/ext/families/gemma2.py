"""Gemma 2: norms at both ends of a branch, GeGLU, bounded scores and logits, a window in every other layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families.family import Family, Fields, rope_scaling
from megatron_port.ext.families.llama import NAMES as LLAMA
from megatron_port.ext.families.shared import GEMMA_HARMLESS, read_gemma_like, write_gemma_like


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model."""
    types = ("sliding_attention", "full_attention")
    values = read_gemma_like(f, vocab=256000, length=8192, types=types, caps=(50.0, 30.0))
    return values | f.rope("rope_theta", 1.0)


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    return write_gemma_like(model) | rope_scaling(model)


# Gemma 2's names: Llama's, with norms of what the branches add.

_NORMS = {
    "post_norm1": "post_attention_layernorm", "norm2": "pre_feedforward_layernorm",
    "post_norm2": "post_feedforward_layernorm",
}
NAMES = replace(LLAMA, inside={**LLAMA.inside, **_NORMS}, buffers=())


FAMILY = Family(
    name="gemma2", architecture="Gemma2ForCausalLM", read=read, write=write, names=NAMES, harmless=GEMMA_HARMLESS
)
