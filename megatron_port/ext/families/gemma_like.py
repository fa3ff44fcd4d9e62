"""Fields that the ``config.json`` of Gemma 2 and of Gemma 3 share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families.fields import Fields, common_sizes, layer_types

HARMLESS = frozenset({"cache_implementation"})


def read_gemma_like(
    f: Fields, *, vocab: int, length: int, types: Sequence[str], caps: tuple[float, float]
) -> dict[str, Any]:
    """Return the fields of a model, positions left out. The arguments are the family's defaults: ``types`` of layers,
    repeated, and ``caps`` of scores and of logits."""
    for name in ("hidden_activation", "hidden_act"):
        f.refuse(name, "gelu_pytorch_tanh", "another gate")
    f.refuse("attention_bias", False, "biases in attention alone")
    f.refuse("use_bidirectional_attention", False, "attention to later tokens")
    layers, head = f.get("num_hidden_layers", 26), f.get("head_dim", 256)
    scalar = f.get("query_pre_attn_scalar", 256)
    if scalar < 1:
        raise f.fault(f"query_pre_attn_scalar is {scalar}; expected at least 1")
    return {
        "num_layers": layers, "hidden_size": f.get("hidden_size", 2304),
        "num_attention_heads": f.get("num_attention_heads", 8), "num_query_groups": f.get("num_key_value_heads", 4),
        "head_dim": head, "ffn_hidden_size": f.get("intermediate_size", 9216), "vocab_size": f.get("vocab_size", vocab),
        "seq_length": f.get("max_position_embeddings", length), "normalization": "rmsnorm",
        "norm_epsilon": f.get("rms_norm_eps", 1e-6), "norm_placement": "sandwich", "norm_zero_centered": True,
        "activation": "geglu_tanh", "add_bias": False, "tie_embeddings": f.get("tie_word_embeddings", True),
        "scale_embedding": True, "attention_dropout": f.get("attention_dropout", 0.0),
        "attention_scale": 0.0 if scalar == head else scalar**-0.5,
        "attention_softcap": f.or_none("attn_logit_softcapping", caps[0]),
        "logits_softcap": f.or_none("final_logit_softcapping", caps[1]),
        "init_std": f.get("initializer_range", 0.02), **f.windows_by_type(layers, types, 4096),
    }


def write_gemma_like(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json, positions left out."""
    scale = model.attention_scale
    return common_sizes(model) | layer_types(model) | {
        "num_key_value_heads": model.kv_heads, "head_dim": model.head_size, "rms_norm_eps": model.norm_epsilon,
        "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
        "query_pre_attn_scalar": round(scale**-2) if scale else model.head_size,
        "attn_logit_softcapping": model.attention_softcap or None,
        "final_logit_softcapping": model.logits_softcap or None, "rope_theta": model.rope_theta,
    }
