"""Llama: rotary positions, RMSNorm, SwiGLU, grouped queries."""

from __future__ import annotations

from typing import Any

from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families.family import Family, Fields, Names
from megatron_port.ext.families.shared import one_bias, read_llama_like, write_llama_like


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model."""
    return read_llama_like(f) | {"add_bias": one_bias(f)}


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    return write_llama_like(model) | {"attention_bias": model.add_bias, "mlp_bias": model.add_bias}


# Llama's names: a matrix for each of query, key and value, and for each of gate and up.

NAMES = Names(
    prefix="model.",
    outside={"embedding.word": "embed_tokens", "final_norm": "norm"},
    head="lm_head.weight",
    layer="layers.{}.",
    inside={
        "norm1": "input_layernorm", "norm2": "post_attention_layernorm",
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.output": "self_attn.o_proj", "mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down": "mlp.down_proj",
    },
    buffers=("rotary_emb.inv_freq",),
)


FAMILY = Family(
    name="llama", architecture="LlamaForCausalLM", read=read, write=write, names=NAMES,
    harmless=frozenset({"pretraining_tp"}),  # the same products, in slices
)
