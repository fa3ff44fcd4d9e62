"""StarCoder2 without a window: LayerNorm, GeLU without a gate, biases, rotary positions, grouped queries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families.family import Family, Fields, activation_there, common_sizes, rope_scaling
from megatron_port.ext.families.llama import NAMES as LLAMA


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model."""
    length = f.get("max_position_embeddings", 4096)
    f.refuse("norm_type", "layer_norm", "another norm")
    f.refuse("mlp_type", "default", "another MLP")
    f.refuse("use_bias", True, "LayerNorm's biases alone")
    dropout = f.get("residual_dropout", 0.0)
    f.refuse("embedding_dropout", dropout, "another probability after the embedding than after the branches")
    heads = f.get("num_attention_heads", 24)
    return {
        "num_layers": f.get("num_hidden_layers", 30), "hidden_size": f.get("hidden_size", 3072),
        "num_attention_heads": heads, "num_query_groups": f.get("num_key_value_heads", 2),
        "head_dim": f.get("head_dim", 0), "ffn_hidden_size": f.get("intermediate_size", 12288),
        "vocab_size": f.get("vocab_size", 49152), "seq_length": length, "normalization": "layernorm",
        "norm_epsilon": f.get("norm_epsilon", 1e-5),
        "activation": f.activation(f.get("hidden_act", "gelu_pytorch_tanh")), "add_bias": True,
        "tie_embeddings": f.get("tie_word_embeddings", True), "hidden_dropout": dropout,
        "sliding_window": f.window("sliding_window", 0),
        "attention_dropout": f.get("attention_dropout", 0.0), "init_std": f.get("initializer_range", 0.018042),
        **f.rope("rope_theta", 1.0),
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    return common_sizes(model) | rope_scaling(model) | {
        "rope_theta": model.rope_theta, "num_key_value_heads": model.kv_heads, "head_dim": model.head_size,
        "norm_epsilon": model.norm_epsilon, "hidden_act": activation_there(model), "use_bias": model.add_bias,
        "residual_dropout": model.hidden_dropout, "embedding_dropout": model.hidden_dropout,
        "sliding_window": model.sliding_window or None,
    }


# StarCoder2's names: Llama's around an MLP of two matrices.

NAMES = replace(LLAMA, inside={**LLAMA.inside, "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}, buffers=())


FAMILY = Family(name="starcoder2", architecture="Starcoder2ForCausalLM", read=read, write=write, names=NAMES)
