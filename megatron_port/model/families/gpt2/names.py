"""GPT-2's names. Its matrices are stored as [in, out]."""

from megatron_port.model.families.family import Names

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
