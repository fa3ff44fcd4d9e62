"""A model family from outside the package: GPT-BigCode (StarCoder; Li et al., arXiv 2305.06161).

GPT-2 with one key/value head for all queries (Shazeer, arXiv 1911.02150) and matrices stored as [out, in]. Its layers
are made of what the package has, so a family is two tables: what config.json says, and where each module's weights are.
"""

from typing import Any

from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families.family import Family, Fields, Names, activation_there

HARMLESS = frozenset({
    "embd_pdrop",  # dropout acts in training only; ours has one probability, that of resid_pdrop
    "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32",  # the precision of one product
    "inference_runner", "validate_runner_input", "pre_allocate_kv_cache", "max_sequence_length", "max_batch_size",
    "pad_key_length", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
    "summary_first_dropout",
})


def read(f: Fields) -> dict[str, Any]:
    """Return the fields of a model. Raises CheckpointError for what our model cannot compute."""
    f.refuse("multi_query", True, "a fused projection with a key and a value for each head")
    f.refuse("num_key_value_heads", 1, "more than one key/value head")
    f.refuse("scale_attn_weights", True, "attention scores that are not divided by the root of the head size")
    f.refuse("add_cross_attention", False, "cross-attention")
    hidden = f.get("n_embd", 768, "hidden_size")
    return {
        "num_layers": f.get("n_layer", 12, "num_hidden_layers"), "hidden_size": hidden,
        "num_attention_heads": f.get("n_head", 12, "num_attention_heads"), "num_query_groups": 1,
        "ffn_hidden_size": f.get("n_inner", 4 * hidden), "vocab_size": f.get("vocab_size", 50257),
        "seq_length": f.get("n_positions", 1024, "max_position_embeddings"), "position_embedding": "learned",
        "normalization": "layernorm", "norm_epsilon": f.get("layer_norm_epsilon", 1e-5),
        "activation": f.activation(f.get("activation_function", "gelu_pytorch_tanh")), "add_bias": True,
        "tie_embeddings": f.get("tie_word_embeddings", True), "hidden_dropout": f.get("resid_pdrop", 0.1),
        "attention_dropout": f.get("attn_pdrop", 0.1), "init_std": f.get("initializer_range", 0.02),
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of a config.json. What they cannot say of a model, reading them back shows."""
    return {
        "n_layer": model.num_layers, "n_embd": model.hidden_size, "n_head": model.num_attention_heads,
        "n_inner": model.ffn_size, "n_positions": model.seq_length, "layer_norm_epsilon": model.norm_epsilon,
        "activation_function": activation_there(model), "multi_query": True, "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout, "attn_pdrop": model.attention_dropout,
    }


NAMES = Names(
    prefix="transformer.",
    outside={"embedding.word": "wte", "embedding.position": "wpe", "final_norm": "ln_f"},
    head="lm_head.weight",
    layer="h.{}.",
    inside={
        "norm1": "ln_1", "norm2": "ln_2", "attention.qkv": "attn.c_attn", "attention.output": "attn.c_proj",
        "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
    },
    buffers=(".attn.bias", ".attn.masked_bias"),
)
"""All queries, the key, the value in one matrix: with one key/value head this is the package's own order."""

FAMILY = Family(
    name="gpt_bigcode", architecture="GPTBigCodeForCausalLM", read=read, write=write, names=NAMES, harmless=HARMLESS
)
