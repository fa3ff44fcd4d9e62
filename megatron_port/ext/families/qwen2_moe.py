"""Qwen1.5-MoE and Qwen2-MoE: Qwen2's layer with experts, and a block beside them whose share is learned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families.family import Family, Fields, windows_by_layer_there
from megatron_port.ext.families.llama import NAMES as LLAMA
from megatron_port.ext.families.shared import (
    MOE_HARMLESS,
    USUAL,
    qwen_experts,
    qwen_experts_there,
    read_llama_like,
    write_llama_like,
)


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model. Windows without ``layer_types``: of every other layer below ``max_window_layers``."""
    values = read_llama_like(
        f, hidden=2048, ffn=5632, vocab=151936, length=32768, groups=16, layers=24, heads=16
    )
    layers, shared = values["num_layers"], f.get("shared_expert_intermediate_size", 5632)
    if shared < 1:
        raise f.fault(f"shared_expert_intermediate_size is {shared}; expected a block that every token passes")
    if f.get("use_sliding_window", False) and f.values.get("layer_types") is None:
        last = f.get("max_window_layers", 28)
        kinds = ["sliding_attention" if i % 2 == 0 and i < last else "full_attention" for i in range(layers)]
        f = f.changed(layer_types=kinds)
    return values | f.windows_by_layer(layers) | {
        "add_bias": False, "qkv_bias": f.get("qkv_bias", True),
        "moe": qwen_experts(
            f, layers, experts=60, top_k=4, width=1408, shared_ffn_hidden_size=shared, shared_gate=True
        ),
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    return write_llama_like(model) | windows_by_layer_there(model) | qwen_experts_there(model) | {
        "qkv_bias": model.qkv_bias, "shared_expert_intermediate_size": model.moe.shared_ffn_hidden_size,
    }


# Qwen2-MoE's names: Llama's, those of experts, and of the block beside them.

_SHARED: dict[str, str | tuple[str, ...]] = {
    "mlp.shared.up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "mlp.shared.down": "mlp.shared_expert.down_proj", "mlp.shared_gate": "mlp.shared_expert_gate",
}
NAMES = replace(LLAMA, inside={**LLAMA.inside, **USUAL, **_SHARED}, buffers=())


FAMILY = Family(
    name="qwen2_moe", architecture="Qwen2MoeForCausalLM", read=read, write=write, names=NAMES, harmless=MOE_HARMLESS
)
