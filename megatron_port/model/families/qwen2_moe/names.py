"""Qwen2-MoE's names: Llama's, those of experts, and of the block beside them."""

from dataclasses import replace

from megatron_port.model.families.llama.names import NAMES as LLAMA
from megatron_port.model.families.moe_like import USUAL

_SHARED: dict[str, str | tuple[str, ...]] = {
    "mlp.shared.up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "mlp.shared.down": "mlp.shared_expert.down_proj", "mlp.shared_gate": "mlp.shared_expert_gate",
}
NAMES = replace(LLAMA, inside={**LLAMA.inside, **USUAL, **_SHARED}, buffers=())
