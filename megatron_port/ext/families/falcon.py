"""Falcon: rotary positions, LayerNorm, GeLU, few keys and values, attention and feed-forward in parallel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families.family import Family, Fields, Names, activation_there, rope_scaling

HARMLESS = frozenset({"apply_residual_connection_post_layernorm"})
"""Not read by transformers."""


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model."""
    f.refuse("alibi", False, "ALiBi positions")
    hidden, heads = f.get("hidden_size", 4544), f.get("num_attention_heads", 71)
    bias = f.get("bias", False)
    return {
        "num_layers": f.get("num_hidden_layers", 32), "hidden_size": hidden, "num_attention_heads": heads,
        "ffn_hidden_size": f.get("ffn_hidden_size", 4 * hidden), "vocab_size": f.get("vocab_size", 65024),
        "seq_length": f.get("max_position_embeddings", 2048), "normalization": "layernorm",
        "norm_epsilon": f.get("layer_norm_epsilon", 1e-5), "activation": f.activation(f.get("activation", "gelu")),
        "add_bias": bias, "norm_bias": not bias, "tie_embeddings": f.get("tie_word_embeddings", True),
        "hidden_dropout": f.get("hidden_dropout", 0.0), "attention_dropout": f.get("attention_dropout", 0.0),
        "init_std": f.get("initializer_range", 0.02), **f.rope("rope_theta", 1.0), **_decoder(f, heads),
    }


def _decoder(f: Fields, heads: int) -> dict[str, Any]:
    """Fields of the layer that the decoder's version decides."""
    new, several = f.get("new_decoder_architecture", False), f.get("num_kv_heads", heads)
    parallel, multi_query = f.get("parallel_attn", True), f.get("multi_query", True)
    norms = f.get("num_ln_in_parallel_attn", 2 if new else 1)
    if norms not in (1, 2) or (norms == 2 and not new) or (new and not parallel):
        raise f.fault(
            f"num_ln_in_parallel_attn {norms}, parallel_attn {parallel}, new_decoder_architecture {new}: transformers "
            "has no such layer"
        )
    if not new and not multi_query and several != heads:
        raise f.fault(f"num_kv_heads is {several}; without new_decoder_architecture and multi_query it is {heads}")
    return {
        "parallel_residual": parallel, "shared_norm": parallel and norms == 1,
        "num_query_groups": 1 if multi_query and not new else several,
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    first = model.kv_heads == 1 and model.shared_norm  # as Falcon-7B
    new = model.parallel_residual and not first
    return rope_scaling(model) | {
        "num_hidden_layers": model.num_layers, "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads, "ffn_hidden_size": model.ffn_size,
        "max_position_embeddings": model.seq_length, "layer_norm_epsilon": model.norm_epsilon,
        "activation": activation_there(model), "bias": model.add_bias, "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout, "rope_theta": model.rope_theta, "alibi": False,
        "new_decoder_architecture": new, "num_kv_heads": model.kv_heads, "multi_query": model.kv_heads == 1 and not new,
        "parallel_attn": model.parallel_residual,
        "num_ln_in_parallel_attn": (1 if model.shared_norm else 2) if new else None,
    }


# Falcon's names. Its fused projection has our order of rows; norms are called by what reads them.

NAMES = Names(
    prefix="transformer.",
    outside={"embedding.word": "word_embeddings", "final_norm": "ln_f"},
    head="lm_head.weight",
    layer="h.{}.",
    inside={
        "norm1": "input_layernorm", "norm2": "post_attention_layernorm",
        "attention.qkv": "self_attention.query_key_value", "attention.output": "self_attention.dense",
        "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h",
    },
    qkv_by_group=True,
    buffers=("rotary_emb.inv_freq",),
)
_TWO_NORMS = replace(NAMES, inside={**NAMES.inside, "norm1": "ln_attn", "norm2": "ln_mlp"})


def names_of(model: ModelConfig) -> Names:
    """Return the names of a model: in parallel, two norms have names of their own."""
    return _TWO_NORMS if model.parallel_residual and not model.shared_norm else NAMES


FAMILY = Family(
    name="falcon", architecture="FalconForCausalLM", read=read, write=write, names=NAMES, names_of=names_of,
    harmless=HARMLESS,
)
