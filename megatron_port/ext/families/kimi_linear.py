"""Kimi Linear: layers of Kimi Delta Attention and of latent attention without positions, with DeepSeek-V3's experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron_port.core.config.model import ATTENTION, MoEConfig, RecurrentConfig
from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families.deepseek_v3 import NAMES as DEEPSEEK_V3
from megatron_port.ext.families.family import Family, Fields
from megatron_port.ext.families.settings import mixers
from megatron_port.ext.families.shared import (
    MOE_HARMLESS,
    experts_named,
    pattern,
    read_latent,
    read_shared,
    write_latent,
)

_MIXERS = {"linear_attention": "kda", "full_attention": ATTENTION}
_LISTS = {"kda_layers": "linear_attention", "full_attn_layers": "full_attention"}
_ONLY = {"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1, "use_grouped_topk": True,
         "num_nextn_predict_layers": 0}
"""Fields of the published files, which transformers takes as they are there."""


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model."""
    for name, value in _ONLY.items():
        f.refuse(name, value, "another model than transformers' of this family")
    shared = f.get("n_shared_experts", 1, "num_shared_experts")
    f = f.changed(
        q_lora_rank=f.values.get("q_lora_rank"), n_shared_experts=shared, head_dim=None,
        max_position_embeddings=f.get("max_position_embeddings", 1048576, "model_max_length"),
        rms_norm_eps=f.get("rms_norm_eps", 1e-5), rope_theta=10000.0, rope_parameters=None, rope_scaling=None,
    )
    values = read_latent(f, hidden=2304, ffn=9216, vocab=163840, layers=27, heads=32)
    if values["tie_embeddings"]:
        f.notes.append(f"{f.where}: tie_word_embeddings is not read: transformers ties no tables of this family")
    recurrent, kinds = _recurrences(f, values["num_layers"])
    return values | mixers([_MIXERS[kind] for kind in kinds]) | {
        "tie_embeddings": False, "rope_pattern": ("none",), "moe": _experts(f, values["num_layers"]),
        "recurrent": recurrent if "linear_attention" in kinds else RecurrentConfig(),
    }


def _recurrences(f: Fields, layers: int) -> tuple[RecurrentConfig, list[str]]:
    """Return the sizes of recurrences, and the kinds of the layers: by ``layer_types``, by the numbers (from 1) in the
    table of the published files, or attention in every fourth but the first."""
    f.asked.update(("linear_attn_config", "layer_types"))
    table = f.values.get("linear_attn_config") or {}
    names = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads",
             "short_conv_kernel_size": "linear_conv_kernel_dim"}
    if not isinstance(table, Mapping) or (unknown := sorted(table.keys() - names.keys() - _LISTS.keys())):
        what = f"has {unknown[0]!r:.60}" if isinstance(table, Mapping) else f"is {table!r:.60}"
        raise f.fault(f"linear_attn_config {what}; expected a table of {', '.join((*names, *_LISTS))}")
    for name, numbers in ((name, table[name]) for name in _LISTS if name in table):
        if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
            raise f.fault(f"linear_attn_config has {name} {numbers!r:.60}; expected a list of layers, from 1")
    f = f.changed(**{names[name]: value for name, value in table.items() if name in names})
    kinds = f.values.get("layer_types")
    if kinds is None and _LISTS.keys() <= table.keys():
        numbers = {number: kind for name, kind in _LISTS.items() for number in table[name]}
        kinds = [numbers.get(layer + 1, "neither") for layer in range(layers)]
    elif kinds is None:
        kinds = [("full" if layer and layer % 4 == 0 else "linear") + "_attention" for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in _MIXERS for kind in kinds):
        raise f.fault(f"layer_types is {kinds!r:.80}; expected {' or '.join(_MIXERS)} for {layers} layers")
    size = f.get("linear_head_dim", 128)
    return RecurrentConfig(
        heads=f.get("linear_num_heads", 32), key_size=size, value_size=size, kernel=f.get("linear_conv_kernel_dim", 4)
    ), kinds


def _experts(f: Fields, layers: int) -> MoEConfig:
    dense, kinds = f.get("first_k_dense_replace", 1), f.or_none("mlp_layer_types", list[str](), None)
    width = f.get("moe_intermediate_size", 1024)
    found = MoEConfig(
        num_experts=f.get("num_local_experts", 256, "num_experts"),
        top_k=f.get("num_experts_per_tok", 8, "num_experts_per_token"), ffn_hidden_size=width,
        shared_ffn_hidden_size=read_shared(f, 1, width), score="sigmoid",
        normalize=f.get("norm_topk_prob", True, "moe_renormalize"), scale=f.get("routed_scaling_factor", 2.446),
        groups=f.get("n_group", 1, "num_expert_group"), top_groups=f.get("topk_group", 1), balance_bias=True,
    )
    if kinds and (len(kinds) != layers or {*kinds} - {"dense", "sparse"}):
        raise f.fault(f"mlp_layer_types is {kinds!r:.80}; expected dense or sparse for {layers} layers")
    sparse = [kind == "sparse" for kind in kinds] if kinds else [layer >= dense for layer in range(layers)]
    return MoEConfig(**{**vars(found), **pattern(f, sparse, "mlp_layer_types")}) if any(sparse) else MoEConfig()


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json, by the names of the published files where transformers knows them too."""
    moe, r, layers = model.moe, model.recurrent, range(model.num_layers)
    numbers: dict[str, Any] = {
        name: [layer + 1 for layer in layers if model.mixer_of(layer) == _MIXERS[kind]] for name, kind in _LISTS.items()
    }
    out = {name: value for name, value in write_latent(model).items() if name != "rope_scaling"}
    out["model_max_length"] = out.pop("max_position_embeddings")
    return out | _ONLY | {
        "linear_attn_config": numbers | {
            "head_dim": r.key_size or model.head_size, "num_heads": r.heads or model.num_attention_heads,
            "short_conv_kernel_size": r.kernel,
        },
        "mlp_layer_types": ["sparse" if moe.has_experts(layer) else "dense" for layer in layers],
        "num_experts": moe.num_experts, "num_experts_per_token": moe.top_k, "moe_intermediate_size": model.expert_size,
        "num_shared_experts": moe.shared_ffn_hidden_size // model.expert_size, "moe_renormalize": moe.normalize,
        "routed_scaling_factor": moe.scale, "num_expert_group": moe.groups, "topk_group": moe.top_groups,
        **({"first_k_dense_replace": moe.first_dense} if moe.enabled and moe.every == 1 else {}),
    }


# The names of the published files. transformers calls a dense layer's block as those with experts when it writes files,
# which it reads under both names. A unit of ours is a head.

OF, BLOCK = "self_attn", "block_sparse_moe"


def packed(model: ModelConfig) -> Iterator[tuple[str, int, int]]:
    """Rows of the projection."""
    r = model.recurrent
    for unit in range(r.heads):
        for part, rows in (("q", r.key_size), ("k", r.key_size), ("v", r.value_size), ("b", 1)):
            yield f"{OF}.{part}_proj.weight", unit * rows, rows


def shared(model: ModelConfig) -> Iterator[tuple[str, int, int]]:
    """Rows of the projection that all heads share: features of decays, then those of gates."""
    for part in "fg":
        yield f"{OF}.{part}_a_proj.weight", 0, model.recurrent.value_size


def convolved(model: ModelConfig) -> Iterator[tuple[str, int, int]]:
    """Channels of the convolution."""
    r = model.recurrent
    for unit in range(r.heads):
        for part, rows in (("q", r.key_size), ("k", r.key_size), ("v", r.value_size)):
            yield f"{OF}.{part}_conv1d.weight", unit * rows, rows


_DENSE = ("gate_proj", "up_proj", "down_proj")
NAMES = replace(
    DEEPSEEK_V3, ahead={}, ahead_copies=("", ""),
    inside={
        **DEEPSEEK_V3.inside, **experts_named(BLOCK, "w1", "w3", "w2"),
        "mlp.shared.up": (f"{BLOCK}.shared_experts.gate_proj", f"{BLOCK}.shared_experts.up_proj"),
        "mlp.shared.down": f"{BLOCK}.shared_experts.down_proj",
    },
    mixers={"kda": {
        "attention.norm": f"{OF}.o_norm", "attention.decay_up": f"{OF}.f_b_proj", "attention.gate_up": f"{OF}.g_b_proj",
    }},
    rows={
        "attention.packed.weight": packed, "attention.shared.weight": shared, "attention.convolution.weight": convolved,
        "attention.decay": lambda model: [(f"{OF}.A_log", 0, model.recurrent.heads)],
        "attention.decay_bias": lambda model: [
            (f"{OF}.dt_bias", 0, model.recurrent.heads * model.recurrent.key_size)
        ],
    },
    convolutions=("_conv1d.weight",), dimensions={"A_log": (1, 1, "rows", 1)},
    also={f"mlp.{part}": f"{BLOCK}.{part}" for part in _DENSE},
    loaded={f"{BLOCK}.": "mlp.", f"{OF}.": f"{OF}.forget_gate."},
    joined={f"{OF}.conv1d": tuple(f"{OF}.{part}_conv1d" for part in "qkv")},
)


FAMILY = Family(
    name="kimi_linear", architecture="KimiLinearForCausalLM", read=read, write=write, names=NAMES,
    harmless=MOE_HARMLESS | {"pretraining_tp"},
)
