"""GPT-NeoX's names. Its fused projection has our order of rows where each head has its own key and value."""

from megatron_port.model.families.family import Names

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
