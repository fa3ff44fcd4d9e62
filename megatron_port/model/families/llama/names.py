"""Llama's names: a matrix for each of query, key and value, and for each of gate and up."""

from megatron_port.model.families.family import Names

NAMES = Names(
    prefix="model.",
    outside={"embedding.word": "embed_tokens", "final_norm": "norm"},
    head="lm_head.weight",
    layer="layers.{}.",
    inside={
        "norm1": "input_layernorm", "norm2": "post_attention_layernorm",
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.output": "self_attn.o_proj", "mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down": "mlp.down_proj",
    },
    buffers=("rotary_emb.inv_freq",),
)
