"""GPT-2: learned positions, LayerNorm, GeLU, biases everywhere, tied ends."""

from __future__ import annotations

from typing import Any

from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families.family import Family, Fields, Names, activation_there

HARMLESS = frozenset({
    "n_ctx",  # an older n_positions, not read by transformers
    "embd_pdrop",  # dropout acts in training only; ours has one probability, that of resid_pdrop
    "reorder_and_upcast_attn",  # the order and precision of one product
    "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
})


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model."""
    f.refuse("scale_attn_weights", True, "attention scores that are not divided by the root of the head size")
    f.refuse("scale_attn_by_inverse_layer_idx", False, "attention scores divided by the layer's number")
    f.refuse("add_cross_attention", False, "cross-attention")
    hidden = f.get("n_embd", 768, "hidden_size")
    return {
        "num_layers": f.get("n_layer", 12, "num_hidden_layers"), "hidden_size": hidden,
        "num_attention_heads": f.get("n_head", 12, "num_attention_heads"),
        "ffn_hidden_size": f.get("n_inner", 4 * hidden), "vocab_size": f.get("vocab_size", 50257),
        "seq_length": f.get("n_positions", 1024, "max_position_embeddings"), "position_embedding": "learned",
        "normalization": "layernorm", "norm_epsilon": f.get("layer_norm_epsilon", 1e-5),
        "activation": f.activation(f.get("activation_function", "gelu_new")), "add_bias": True,
        "tie_embeddings": f.get("tie_word_embeddings", True), "hidden_dropout": f.get("resid_pdrop", 0.1),
        "attention_dropout": f.get("attn_pdrop", 0.1), "init_std": f.get("initializer_range", 0.02),
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    return {
        "n_layer": model.num_layers, "n_embd": model.hidden_size, "n_head": model.num_attention_heads,
        "n_inner": model.ffn_size, "n_positions": model.seq_length, "n_ctx": model.seq_length,
        "layer_norm_epsilon": model.norm_epsilon, "activation_function": activation_there(model),
        "resid_pdrop": model.hidden_dropout, "embd_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
    }


# GPT-2's names. Its matrices are stored as [in, out].

NAMES = Names(
    prefix="transformer.",
    outside={"embedding.word": "wte", "embedding.position": "wpe", "final_norm": "ln_f"},
    head="lm_head.weight",
    layer="h.{}.",
    inside={
        "norm1": "ln_1", "norm2": "ln_2", "attention.qkv": "attn.c_attn", "attention.output": "attn.c_proj",
        "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
    },
    transposed=("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"),
    buffers=(".attn.bias", ".attn.masked_bias"),
)


FAMILY = Family(
    name="gpt2", architecture="GPT2LMHeadModel", read=read, write=write, names=NAMES, harmless=HARMLESS
)
