"""Fields that the ``config.json`` of Llama and of the families like it share."""

from __future__ import annotations

from typing import Any

from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families.fields import Fields, common_sizes, rope_scaling


def read_llama_like(
    f: Fields, *, hidden: int = 4096, ffn: int = 11008, vocab: int = 32000, length: int = 2048, groups: int = 0,
    head: int = 0, epsilon: float = 1e-6, partial: bool = False, theta: float = 10000.0, layers: int = 32,
    heads: int = 32, tied: bool = False,
) -> dict[str, Any]:
    """Return the fields of a model, biases left out. The arguments are the family's defaults; ``groups`` 0: as many as
    heads. ``partial``: the family may rotate a part of each head."""
    f.silu()
    heads = f.get("num_attention_heads", heads)
    rope = f.rope("rope_theta", 1.0, theta, partial=partial)
    return {
        "num_layers": f.get("num_hidden_layers", layers), "hidden_size": f.get("hidden_size", hidden),
        "num_attention_heads": heads, "num_query_groups": f.or_none("num_key_value_heads", groups or heads, heads),
        "head_dim": f.get("head_dim", head), "ffn_hidden_size": f.get("intermediate_size", ffn),
        "vocab_size": f.get("vocab_size", vocab), "seq_length": f.get("max_position_embeddings", length),
        "normalization": "rmsnorm", "norm_epsilon": f.get("rms_norm_eps", epsilon), "activation": "swiglu",
        "tie_embeddings": f.get("tie_word_embeddings", tied), "attention_dropout": f.or_none("attention_dropout", 0.0),
        "init_std": f.get("initializer_range", 0.02), **rope,
    }


def one_bias(f: Fields) -> bool:
    """Whether there are biases: in attention and MLP, or in neither."""
    attention, mlp = bool(f.get("attention_bias", False)), bool(f.get("mlp_bias", False))
    if attention != mlp:
        raise f.fault(f"attention_bias {attention}, mlp_bias {mlp}: this model has biases everywhere or nowhere")
    return attention


def write_llama_like(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json, biases left out."""
    return common_sizes(model) | rope_scaling(model) | {
        "rope_theta": model.rope_theta, "rms_norm_eps": model.norm_epsilon, "hidden_act": "silu",
        "num_key_value_heads": model.kv_heads, "head_dim": model.head_size,
    }
