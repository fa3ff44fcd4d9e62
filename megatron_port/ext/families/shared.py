"""Fields that the ``config.json`` of Llama and of the families like it share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_port.core.config.model import MoEConfig
from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families.family import TABLES, Fields, common_sizes, layer_types, rope_scaling, yarn_growth


def read_llama_like(
    f: Fields, *, hidden: int = 4096, ffn: int = 11008, vocab: int = 32000, length: int = 2048, groups: int = 0,
    head: int = 0, epsilon: float = 1e-6, partial: bool = False, theta: float = 10000.0, layers: int = 32,
    heads: int = 32, tied: bool = False,
) -> dict[str, Any]:
    """Return the fields of a model, biases left out. The arguments are the family's defaults; ``groups`` 0: as many as
    heads. ``partial``: the family may rotate a part of each head."""
    f.silu()
    heads = f.get("num_attention_heads", heads)
    rope = f.rope("rope_theta", 1.0, theta, partial=partial)
    return {
        "num_layers": f.get("num_hidden_layers", layers), "hidden_size": f.get("hidden_size", hidden),
        "num_attention_heads": heads, "num_query_groups": f.or_none("num_key_value_heads", groups or heads, heads),
        "head_dim": f.get("head_dim", head), "ffn_hidden_size": f.get("intermediate_size", ffn),
        "vocab_size": f.get("vocab_size", vocab), "seq_length": f.get("max_position_embeddings", length),
        "normalization": "rmsnorm", "norm_epsilon": f.get("rms_norm_eps", epsilon), "activation": "swiglu",
        "tie_embeddings": f.get("tie_word_embeddings", tied), "attention_dropout": f.or_none("attention_dropout", 0.0),
        "init_std": f.get("initializer_range", 0.02), **rope,
    }


def one_bias(f: Fields) -> bool:
    """Whether there are biases: in attention and MLP, or in neither."""
    attention, mlp = bool(f.get("attention_bias", False)), bool(f.get("mlp_bias", False))
    if attention != mlp:
        raise f.fault(f"attention_bias {attention}, mlp_bias {mlp}: this model has biases everywhere or nowhere")
    return attention


def write_llama_like(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json, biases left out."""
    return common_sizes(model) | rope_scaling(model) | {
        "rope_theta": model.rope_theta, "rms_norm_eps": model.norm_epsilon, "hidden_act": "silu",
        "num_key_value_heads": model.kv_heads, "head_dim": model.head_size,
    }


# Fields that the ``config.json`` of Gemma 2 and of Gemma 3 share.

GEMMA_HARMLESS = frozenset({"cache_implementation"})


def read_gemma_like(
    f: Fields, *, vocab: int, length: int, types: Sequence[str], caps: tuple[float, float]
) -> dict[str, Any]:
    """Return the fields of a model, positions left out. The arguments are the family's defaults: ``types`` of layers,
    repeated, and ``caps`` of scores and of logits."""
    for name in ("hidden_activation", "hidden_act"):
        f.refuse(name, "gelu_pytorch_tanh", "another gate")
    f.refuse("attention_bias", False, "biases in attention alone")
    f.refuse("use_bidirectional_attention", False, "attention to later tokens")
    layers, head = f.get("num_hidden_layers", 26), f.get("head_dim", 256)
    scalar = f.get("query_pre_attn_scalar", 256)
    if scalar < 1:
        raise f.fault(f"query_pre_attn_scalar is {scalar}; expected at least 1")
    return {
        "num_layers": layers, "hidden_size": f.get("hidden_size", 2304),
        "num_attention_heads": f.get("num_attention_heads", 8), "num_query_groups": f.get("num_key_value_heads", 4),
        "head_dim": head, "ffn_hidden_size": f.get("intermediate_size", 9216), "vocab_size": f.get("vocab_size", vocab),
        "seq_length": f.get("max_position_embeddings", length), "normalization": "rmsnorm",
        "norm_epsilon": f.get("rms_norm_eps", 1e-6), "norm_placement": "sandwich", "norm_zero_centered": True,
        "activation": "geglu_tanh", "add_bias": False, "tie_embeddings": f.get("tie_word_embeddings", True),
        "scale_embedding": True, "attention_dropout": f.get("attention_dropout", 0.0),
        "attention_scale": 0.0 if scalar == head else scalar**-0.5,
        "attention_softcap": f.or_none("attn_logit_softcapping", caps[0]),
        "logits_softcap": f.or_none("final_logit_softcapping", caps[1]),
        "init_std": f.get("initializer_range", 0.02), **f.windows_by_type(layers, types, 4096),
    }


def write_gemma_like(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json, positions left out."""
    scale = model.attention_scale
    return common_sizes(model) | layer_types(model) | {
        "num_key_value_heads": model.kv_heads, "head_dim": model.head_size, "rms_norm_eps": model.norm_epsilon,
        "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
        "query_pre_attn_scalar": round(scale**-2) if scale else model.head_size,
        "attn_logit_softcapping": model.attention_softcap or None,
        "final_logit_softcapping": model.logits_softcap or None, "rope_theta": model.rope_theta,
    }


# Fields of latent attention (MLA) that the ``config.json`` of DeepSeek's models share.

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
    return values | {
        "add_bias": False, "num_query_groups": 0, "head_dim": nope + rotated, "qk_rope_head_dim": rotated,
        "kv_lora_rank": f.get("kv_lora_rank", 512), "v_head_dim": f.get("v_head_dim", 128),
        # null there: queries come from the input
        "q_lora_rank": f.or_none("q_lora_rank", 1536, 0),
        "latent_norm_epsilon": 0.0 if values["norm_epsilon"] == LATENT_EPSILON else LATENT_EPSILON,
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


# Fields of experts that the ``config.json`` of several families share.

MOE_HARMLESS = frozenset({"output_router_logits", "router_aux_loss_coef"})
"""A loss that transformers adds where its caller asks for it; ours is ``model.moe.balance_loss``."""


def pattern(f: Fields, sparse: Sequence[bool], what: str) -> dict[str, int]:
    """Return ``first_dense`` and ``every`` of the layers that have experts, at least one of them.

    Raises:
        CheckpointError: they do not follow one another at equal distances to the end; ``what`` asks for that.
    """
    layers, first = len(sparse), list(sparse).index(True)
    for every in range(1, first + 2):
        found = MoEConfig(num_experts=1, first_dense=first + 1 - every, every=every)
        if all(found.has_experts(layer) == has for layer, has in enumerate(sparse)):
            return {"first_dense": found.first_dense, "every": every}
    dense = [layer for layer in range(layers) if not sparse[layer]]
    raise f.fault(f"{what} makes layers {dense!r:.80} of {layers} dense; this model has experts in every n-th layer")


def sparse_layers(f: Fields, layers: int) -> list[bool]:
    """Return which layers have experts by ``mlp_only_layers`` and ``decoder_sparse_step`` (Qwen)."""
    dense, step = f.get("mlp_only_layers", list[int]()), f.get("decoder_sparse_step", 1)
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]


def qwen_experts(f: Fields, layers: int, *, experts: int, top_k: int, width: int, **more: Any) -> MoEConfig:
    """Return the experts of Qwen's models; the arguments are the family's defaults."""
    sparse = sparse_layers(f, layers)
    found = MoEConfig(
        num_experts=f.get("num_experts", experts, "num_local_experts"), top_k=f.get("num_experts_per_tok", top_k),
        ffn_hidden_size=f.get("moe_intermediate_size", width), normalize=f.get("norm_topk_prob", False), **more,
    )
    if found.num_experts < 1 or not any(sparse):
        raise f.fault(
            f"num_experts {found.num_experts}, mlp_only_layers and decoder_sparse_step leave no layer with experts"
        )
    return MoEConfig(**{**vars(found), **pattern(f, sparse, "mlp_only_layers and decoder_sparse_step")})


def qwen_experts_there(model: ModelConfig) -> dict[str, Any]:
    """Fields that :func:`qwen_experts` reads."""
    moe = model.moe
    return {
        "num_experts": moe.num_experts, "num_experts_per_tok": moe.top_k, "moe_intermediate_size": model.expert_size,
        "norm_topk_prob": moe.normalize, "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in range(model.num_layers) if not moe.has_experts(layer)],
    }


def experts_named(block: str, gate: str, up: str, down: str) -> dict[str, str | tuple[str, ...]]:
    """Return the names of router and experts below ``block``."""
    each = f"{block}.experts.{{}}"
    return {
        "mlp.router": f"{block}.gate", "mlp.experts.up": (f"{each}.{gate}", f"{each}.{up}"),
        "mlp.experts.down": f"{each}.{down}",
    }


USUAL = experts_named("mlp", "gate_proj", "up_proj", "down_proj")
"""Names of router and experts in most families."""
