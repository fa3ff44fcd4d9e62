"""Qwen3's config.json."""

from __future__ import annotations

from typing import Any

from megatron_port.config.schema import ModelConfig
from megatron_port.model.families.fields import Fields, common_sizes, rope_scaling

HARMLESS = frozenset({"sliding_window", "max_window_layers"})
"""Read by transformers only where use_sliding_window is true, which is refused."""


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model."""
    f.silu()
    f.refuse("attention_bias", False, "biases in attention alone")
    f.refuse("use_sliding_window", False, "attention over a window")
    f.refuse("partial_rotary_factor", 1.0, "rotation of a part of each head")
    layers = f.get("num_hidden_layers", 32)
    f.refuse("layer_types", ["full_attention"] * layers, "attention over a window")
    return {
        "num_layers": layers, "hidden_size": f.get("hidden_size", 4096),
        "num_attention_heads": f.get("num_attention_heads", 32), "num_query_groups": f.get("num_key_value_heads", 32),
        "head_dim": f.get("head_dim", 128), "ffn_hidden_size": f.get("intermediate_size", 22016),
        "vocab_size": f.get("vocab_size", 151936), "seq_length": f.get("max_position_embeddings", 32768),
        "normalization": "rmsnorm", "norm_epsilon": f.get("rms_norm_eps", 1e-6), "activation": "swiglu",
        "add_bias": False, "qk_norm": True, "tie_embeddings": f.get("tie_word_embeddings", False),
        "attention_dropout": f.get("attention_dropout", 0.0), "init_std": f.get("initializer_range", 0.02),
        **f.rope("rope_theta", 1.0),
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    return common_sizes(model) | rope_scaling(model) | {
        "rope_theta": model.rope_theta, "rms_norm_eps": model.norm_epsilon, "hidden_act": "silu",
        "num_key_value_heads": model.kv_heads, "head_dim": model.head_size, "attention_bias": False,
        "use_sliding_window": False,
    }
