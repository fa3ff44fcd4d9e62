"""GPT-OSS: biases everywhere, attention with sinks and windows, experts with a clamped activation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_port.core.config.model import CLAMP, SHARPNESS, MoEConfig
from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families import shared as moe_like
from megatron_port.ext.families.family import Family, Fields, layer_types
from megatron_port.ext.families.llama import NAMES as LLAMA
from megatron_port.ext.families.shared import read_llama_like, write_llama_like

HARMLESS = moe_like.MOE_HARMLESS | {"experts_per_token", "initial_context_length"}
"""The last two repeat others."""
_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Where config.json has no table."""


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model."""
    f.refuse("attention_bias", True, "biases of experts alone")
    f.refuse("swiglu_alpha", SHARPNESS, "another activation")
    f.refuse("swiglu_limit", CLAMP, "another activation")
    if not (f.values.get("rope_parameters") or f.values.get("rope_scaling")):
        f = f.changed(rope_parameters=_YARN)
    values = read_llama_like(
        f, hidden=2880, ffn=2880, vocab=201088, length=131072, groups=8, head=64, heads=64, layers=36, epsilon=1e-5,
        theta=150000.0,
    )
    return values | f.windows_by_type(values["num_layers"], ("sliding_attention", "full_attention"), 128) | {
        "add_bias": True, "attention_sinks": True, "activation": "swiglu_clamped",
        "moe": MoEConfig(
            num_experts=f.get("num_local_experts", 128, "num_experts"), top_k=f.get("num_experts_per_tok", 4),
            router_bias=True,
        ),
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    out = write_llama_like(model) | layer_types(model)
    if model.rope_scaling == "none":
        out["rope_scaling"] = {"rope_type": "default"}
    return out | {
        "attention_bias": True, "intermediate_size": model.expert_size, "num_local_experts": model.moe.num_experts,
        "num_experts_per_tok": model.moe.top_k, "swiglu_limit": CLAMP,
    }


# GPT-OSS's names: Llama's, sinks, and two tensors of all experts.

_OWN = {
    "attention": "self_attn", "mlp.router": "mlp.router", "mlp.experts.up": "mlp.experts.gate_up_proj",
    "mlp.experts.down": "mlp.experts.down_proj",
}
NAMES = replace(LLAMA, inside={**LLAMA.inside, **_OWN}, buffers=())


FAMILY = Family(
    name="gpt_oss", architecture="GptOssForCausalLM", read=read, write=write, names=NAMES, harmless=HARMLESS
)
