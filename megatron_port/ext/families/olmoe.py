"""OLMoE: Llama's layer with norms of all queries and of all keys, and experts whose scores are not normalised."""

from __future__ import annotations

from typing import Any

from megatron_port.core.config.model import MoEConfig
from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families.family import Family, Fields
from megatron_port.ext.families.qwen3_moe import NAMES
from megatron_port.ext.families.shared import MOE_HARMLESS, read_llama_like, write_llama_like


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model."""
    f.refuse("attention_bias", False, "biases in attention alone")
    f.refuse("clip_qkv", None, "a bound of queries, keys and values")
    values = read_llama_like(
        f, hidden=2048, ffn=2048, vocab=50304, length=4096, layers=16, heads=16, epsilon=1e-5
    )
    return values | {
        "add_bias": False, "qk_norm": True, "qk_norm_over": "projection",
        "moe": MoEConfig(
            num_experts=f.get("num_experts", 64, "num_local_experts"), top_k=f.get("num_experts_per_tok", 8),
            normalize=f.get("norm_topk_prob", False),
        ),
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    return write_llama_like(model) | {
        "attention_bias": False, "intermediate_size": model.expert_size, "num_experts": model.moe.num_experts,
        "num_experts_per_tok": model.moe.top_k, "norm_topk_prob": model.moe.normalize,
    }


FAMILY = Family(
    name="olmoe", architecture="OlmoeForCausalLM", read=read, write=write, names=NAMES, harmless=MOE_HARMLESS,
)
