"""Falcon's names. Its fused projection has our order of rows; norms are called by what reads them."""

from dataclasses import replace

from megatron_port.config.schema import ModelConfig
from megatron_port.model.families.family import Names

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
