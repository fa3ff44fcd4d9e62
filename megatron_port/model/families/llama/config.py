"""Llama's config.json."""

from __future__ import annotations

from typing import Any

from megatron_port.config.schema import ModelConfig
from megatron_port.model.families.fields import Fields, common_sizes, rope_scaling


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model."""
    f.silu()
    f.refuse("pretraining_tp", 1, "products in slices")
    f.refuse("partial_rotary_factor", 1.0, "rotation of a part of each head")
    biases = f.get("attention_bias", False), f.get("mlp_bias", False)
    if biases[0] != biases[1]:
        raise f.fault(f"attention_bias {biases[0]}, mlp_bias {biases[1]}: this model has biases everywhere or nowhere")
    heads = f.get("num_attention_heads", 32)
    return {
        "num_layers": f.get("num_hidden_layers", 32), "hidden_size": f.get("hidden_size", 4096),
        "num_attention_heads": heads, "num_query_groups": f.get("num_key_value_heads", heads),
        "head_dim": f.get("head_dim", 0), "ffn_hidden_size": f.get("intermediate_size", 11008),
        "vocab_size": f.get("vocab_size", 32000), "seq_length": f.get("max_position_embeddings", 2048),
        "normalization": "rmsnorm", "norm_epsilon": f.get("rms_norm_eps", 1e-6), "activation": "swiglu",
        "add_bias": biases[0], "tie_embeddings": f.get("tie_word_embeddings", False),
        "attention_dropout": f.get("attention_dropout", 0.0), "init_std": f.get("initializer_range", 0.02),
        **f.rope("rope_theta", 1.0),
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    return common_sizes(model) | rope_scaling(model) | {
        "rope_theta": model.rope_theta, "rms_norm_eps": model.norm_epsilon, "hidden_act": "silu",
        "num_key_value_heads": model.kv_heads, "head_dim": model.head_size, "attention_bias": model.add_bias,
        "mlp_bias": model.add_bias,
    }
