"""Mixtral: Mistral's layer with experts, softmax over those that are chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_port.core.config.model import MoEConfig
from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families.family import Family, Fields
from megatron_port.ext.families.llama import NAMES as LLAMA
from megatron_port.ext.families.shared import MOE_HARMLESS, experts_named, read_llama_like, write_llama_like


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model."""
    f.refuse("router_jitter_noise", 0.0, "noise in what experts read, not in what the router reads alone")
    values = read_llama_like(f, ffn=14336, length=4096 * 32, groups=8, epsilon=1e-5, theta=1e6)
    return values | {
        "add_bias": False, "sliding_window": f.window("sliding_window", 0),
        "moe": MoEConfig(
            num_experts=f.get("num_local_experts", 8, "num_experts"), top_k=f.get("num_experts_per_tok", 2)
        ),
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    return write_llama_like(model) | {
        "intermediate_size": model.expert_size, "num_local_experts": model.moe.num_experts,
        "num_experts_per_tok": model.moe.top_k, "sliding_window": model.sliding_window or None,
        "router_jitter_noise": 0.0,
    }


# Mixtral's names: Llama's, and a block of experts with names of its own.

_EXPERTS = experts_named("block_sparse_moe", "w1", "w3", "w2")
NAMES = replace(LLAMA, inside={**LLAMA.inside, **_EXPERTS}, buffers=(), loaded={".block_sparse_moe.": ".mlp."})


FAMILY = Family(
    name="mixtral", architecture="MixtralForCausalLM", read=read, write=write, names=NAMES, harmless=MOE_HARMLESS
)
