"""DeepSeek-V3's names: Llama's, and those of the latents."""

from dataclasses import replace

from megatron_port.model.families.llama.names import NAMES as LLAMA

_LATENTS = {
    "attention.query": "self_attn.q_proj", "attention.query_down": "self_attn.q_a_proj",
    "attention.query_norm": "self_attn.q_a_layernorm", "attention.query_up": "self_attn.q_b_proj",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa", "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj",
}
NAMES = replace(LLAMA, inside={**LLAMA.inside, **_LATENTS}, buffers=())
