"""Fields of latent attention (MLA) that the ``config.json`` of DeepSeek's models share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families.fields import Fields
from megatron_port.ext.families.llama_like import read_llama_like, write_llama_like
from megatron_port.ext.families.rope_fields import TABLES, yarn_growth

LATENT_EPSILON = 1e-6
"""Epsilon of the latents' norms, whatever ``rms_norm_eps`` says."""
_SCALES = ("mscale", "mscale_all_dim")


def read_latent(f: Fields, **defaults: Any) -> dict[str, Any]:
    """Return the fields of a model; ``defaults`` as :func:`read_llama_like` takes them."""
    f.refuse("attention_bias", False, "biases in attention alone")
    nope, rotated = f.get("qk_nope_head_dim", 128), f.get("qk_rope_head_dim", 64)
    f.refuse("qk_head_dim", nope + rotated, "queries of another size than their parts")
    f.refuse("head_dim", rotated, "a head of another size than the rotated part")
    tables = {name: dict(f.values[name]) for name in TABLES if isinstance(f.values.get(name), Mapping)}
    read = next((table for table in tables.values() if table), {})
    scale, everywhere = (read.get(name) for name in _SCALES)
    f = f.changed(**{name: {k: v for k, v in t.items() if k not in _SCALES} for name, t in tables.items()})
    values = read_llama_like(f, **defaults)
    heads = values["num_attention_heads"]
    if values["num_query_groups"] != heads:
        raise f.fault(f"num_key_value_heads is {values['num_query_groups']}; latent attention has one a head, {heads}")
    if values["norm_epsilon"] != LATENT_EPSILON:
        raise f.fault(f"rms_norm_eps is {values['norm_epsilon']}: the latents' norms have {LATENT_EPSILON}")
    return values | {
        "add_bias": False, "num_query_groups": 0, "head_dim": nope + rotated, "qk_rope_head_dim": rotated,
        "kv_lora_rank": f.get("kv_lora_rank", 512), "v_head_dim": f.get("v_head_dim", 128),
        # null there: queries come from the input
        "q_lora_rank": f.or_none("q_lora_rank", 1536, 0),
    } | _scales(f, values, nope + rotated, scale, everywhere)


def _scales(f: Fields, values: Mapping[str, Any], head: int, scale: Any, everywhere: Any) -> dict[str, Any]:
    """Factors of YaRN on the rotated elements and on all."""
    if values.get("rope_scaling") != "yarn" or not everywhere:
        if scale or everywhere:
            raise f.fault(f"mscale {scale!r:.40}, mscale_all_dim {everywhere!r:.40}: they go together, with yarn")
        return {}
    if not isinstance(everywhere, float | int) or not isinstance(scale, float | int):
        raise f.fault(f"mscale is {scale!r:.40} and mscale_all_dim {everywhere!r:.40}; expected two numbers")
    grown = yarn_growth(values["rope_factor"], everywhere)
    return {
        "rope_attention_factor": values["rope_attention_factor"] or yarn_growth(values["rope_factor"], scale) / grown,
        "attention_scale": grown * grown / math.sqrt(head),
    }


def write_latent(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    out = write_llama_like(model)
    if model.rope_scaling == "yarn" and model.attention_scale and model.rope_factor > 1:
        grown = math.sqrt(model.attention_scale * math.sqrt(model.head_size))
        unit = 0.1 * math.log(model.rope_factor)
        factor = model.rope_attention_factor or 1.0
        table = {k: v for k, v in out["rope_scaling"].items() if k != "attention_factor"}
        table |= {
            "mscale": round((factor * grown - 1) / unit, 6), "mscale_all_dim": round((grown - 1) / unit, 6),
        }
        out["rope_scaling"] = table
    return out | {
        "head_dim": model.qk_rope_head_dim, "num_key_value_heads": model.num_attention_heads,
        "qk_rope_head_dim": model.qk_rope_head_dim, "qk_nope_head_dim": model.head_size - model.qk_rope_head_dim,
        "v_head_dim": model.value_size, "kv_lora_rank": model.kv_lora_rank, "q_lora_rank": model.q_lora_rank or None,
        "attention_bias": False,
    }


def read_shared(f: Fields, shared: int, width: int) -> int:
    """Return the width of the block beside the experts, as wide as ``shared`` of them by default."""
    count: int = f.get("n_shared_experts", shared)
    if count < 1:
        raise f.fault(f"n_shared_experts is {count}; these models have a block that every token passes")
    return count * width


def experts_there(model: ModelConfig) -> dict[str, Any]:
    """Fields of experts that all of DeepSeek's models have."""
    moe = model.moe
    if not moe.enabled:
        return {"first_k_dense_replace": model.num_layers}
    return {
        "first_k_dense_replace": moe.first_dense, "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": model.expert_size, "n_shared_experts": moe.shared_ffn_hidden_size // model.expert_size,
        "n_group": moe.groups, "topk_group": moe.top_groups, "routed_scaling_factor": moe.scale,
        "norm_topk_prob": moe.normalize,
    }
