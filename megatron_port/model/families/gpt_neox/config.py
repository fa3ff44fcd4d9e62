"""GPT-NeoX's config.json."""

from __future__ import annotations

from typing import Any

from megatron_port.config.schema import ModelConfig
from megatron_port.model.families.fields import Fields, activation_there, common_sizes, rope_scaling

HARMLESS = frozenset({"classifier_dropout"})


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model."""
    f.refuse("attention_bias", True, "attention without biases and the rest with them")
    return {
        "num_layers": f.get("num_hidden_layers", 44), "hidden_size": f.get("hidden_size", 6144),
        "num_attention_heads": f.get("num_attention_heads", 64),
        "ffn_hidden_size": f.get("intermediate_size", 24576), "vocab_size": f.get("vocab_size", 50432),
        "seq_length": f.get("max_position_embeddings", 2048), "normalization": "layernorm",
        "norm_epsilon": f.get("layer_norm_eps", 1e-5), "activation": f.activation(f.get("hidden_act", "gelu")),
        "add_bias": True, "tie_embeddings": f.get("tie_word_embeddings", False),
        "parallel_residual": f.get("use_parallel_residual", True), "hidden_dropout": f.get("hidden_dropout", 0.0),
        "attention_dropout": f.get("attention_dropout", 0.0), "init_std": f.get("initializer_range", 0.02),
        **f.rope("rotary_emb_base", f.get("rotary_pct", 0.25), partial=True),
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    return common_sizes(model) | rope_scaling(model) | {
        "layer_norm_eps": model.norm_epsilon, "hidden_act": activation_there(model),
        "rotary_pct": model.rotary_percent, "rotary_emb_base": model.rope_theta,
        "use_parallel_residual": model.parallel_residual, "attention_bias": True,
        "hidden_dropout": model.hidden_dropout,
    }
