"""GPT-J: neighbouring elements of a head rotate, one LayerNorm for attention and feed-forward in parallel."""

from __future__ import annotations

from typing import Any

from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families.family import Family, Fields, Names, activation_there

HARMLESS = frozenset({
    "embd_pdrop",  # dropout acts in training only; ours has one probability, that of resid_pdrop
    "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
    "scale_attn_weights", "gradient_checkpointing", "rotary",  # not read by transformers
})


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model."""
    hidden, heads = f.get("n_embd", 4096, "hidden_size"), f.get("n_head", 16, "num_attention_heads")
    f.asked.add("rotary_dim")
    rotated, size = f.values.get("rotary_dim", 64), hidden // max(heads, 1)
    if not isinstance(rotated, int) or not 0 < rotated <= size:
        raise f.fault(f"rotary_dim is {rotated!r:.80}; expected a number of elements of a head of {size}")
    return {
        "num_layers": f.get("n_layer", 28, "num_hidden_layers"), "hidden_size": hidden, "num_attention_heads": heads,
        "ffn_hidden_size": f.get("n_inner", 4 * hidden), "vocab_size": f.get("vocab_size", 50400),
        "seq_length": f.get("n_positions", 2048, "max_position_embeddings"), "position_embedding": "rope",
        "rotary_percent": rotated / size, "normalization": "layernorm",
        "norm_epsilon": f.get("layer_norm_epsilon", 1e-5), "parallel_residual": True, "shared_norm": True,
        "activation": f.activation(f.get("activation_function", "gelu_new")), "add_bias": False, "mlp_bias": True,
        "norm_bias": True, "head_bias": True, "tie_embeddings": f.get("tie_word_embeddings", False),
        "hidden_dropout": f.get("resid_pdrop", 0.0), "attention_dropout": f.get("attn_pdrop", 0.0),
        "init_std": f.get("initializer_range", 0.02),
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    return {
        "n_layer": model.num_layers, "n_embd": model.hidden_size, "n_head": model.num_attention_heads,
        "n_inner": model.ffn_size, "n_positions": model.seq_length, "rotary_dim": model.rotary_size,
        "layer_norm_epsilon": model.norm_epsilon, "activation_function": activation_there(model),
        "resid_pdrop": model.hidden_dropout, "embd_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
    }


# GPT-J's names: a matrix for each of query, key and value.

NAMES = Names(
    prefix="transformer.",
    outside={"embedding.word": "wte", "final_norm": "ln_f"},
    head="lm_head.weight",
    layer="h.{}.",
    inside={
        "norm1": "ln_1", "attention.qkv": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        "attention.output": "attn.out_proj", "mlp.up": "mlp.fc_in", "mlp.down": "mlp.fc_out",
    },
    rotation="interleaved",
    buffers=(".attn.bias", ".attn.masked_bias", ".attn.embed_positions"),
)


FAMILY = Family(name="gptj", architecture="GPTJForCausalLM", read=read, write=write, names=NAMES, harmless=HARMLESS)
