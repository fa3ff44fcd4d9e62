"""Qwen3's names: Llama's, and the norms of query and key heads."""

from megatron_port.model.families.family import Names

NAMES = Names(
    prefix="model.",
    outside={"embedding.word": "embed_tokens", "final_norm": "norm"},
    head="lm_head.weight",
    layer="layers.{}.",
    inside={
        "norm1": "input_layernorm", "norm2": "post_attention_layernorm",
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm",
        "attention.output": "self_attn.o_proj", "mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down": "mlp.down_proj",
    },
)
