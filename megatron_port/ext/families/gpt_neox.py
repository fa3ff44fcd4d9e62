"""GPT-NeoX: partial rotary positions, LayerNorm, GeLU, attention and feed-forward in parallel."""

from __future__ import annotations

from typing import Any

from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families.family import Family, Fields, Names, activation_there, common_sizes, rope_scaling

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


# GPT-NeoX's names. Its fused projection has our order of rows where each head has its own key and value.

NAMES = Names(
    prefix="gpt_neox.",
    outside={"embedding.word": "embed_in", "final_norm": "final_layer_norm"},
    head="embed_out.weight",
    layer="layers.{}.",
    inside={
        "norm1": "input_layernorm", "norm2": "post_attention_layernorm", "attention.qkv": "attention.query_key_value",
        "attention.output": "attention.dense", "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h",
    },
    qkv_by_group=True,
    rotation="first",
    buffers=(".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq"),
)


FAMILY = Family(
    name="gpt_neox", architecture="GPTNeoXForCausalLM", read=read, write=write, names=NAMES, harmless=HARMLESS
)
