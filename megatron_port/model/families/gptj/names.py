"""GPT-J's names: a matrix for each of query, key and value."""

from megatron_port.model.families.family import Names

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
