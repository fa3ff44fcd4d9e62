"""DeepSeek-V3's names: Llama's, those of latents, of experts and the block beside them, of further tokens."""

from dataclasses import replace

from megatron_port.model.families.llama.names import NAMES as LLAMA
from megatron_port.model.families.moe_like import USUAL

_LATENTS = {
    "attention.query": "self_attn.q_proj", "attention.query_down": "self_attn.q_a_proj",
    "attention.query_norm": "self_attn.q_a_layernorm", "attention.query_up": "self_attn.q_b_proj",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa", "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj",
}
_SHARED: dict[str, str | tuple[str, ...]] = {
    "mlp.shared.up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "mlp.shared.down": "mlp.shared_experts.down_proj",
}
_AHEAD = {
    "embedding_norm": "enorm", "hidden_norm": "hnorm", "projection": "eh_proj", "norm": "shared_head.norm",
}
NAMES = replace(
    LLAMA, inside={**LLAMA.inside, **_LATENTS, **USUAL, **_SHARED}, buffers=(),
    kinds={"balance_bias": "e_score_correction_bias"},
    ahead=_AHEAD, ahead_copies=("embed_tokens", "shared_head.head"),
)
