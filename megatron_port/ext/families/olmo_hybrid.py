"""OLMo Hybrid: layers of Gated DeltaNet behind norms, and OLMo 2's layers, whose norms are behind attention and MLP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron_port.core.config.model import ATTENTION, RecurrentConfig
from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families.family import TABLES, Family, Fields
from megatron_port.ext.families.olmo2 import NAMES as OLMO2
from megatron_port.ext.families.settings import mixers, norms
from megatron_port.ext.families.shared import read_llama_like, write_llama_like

_MIXERS = {"linear_attention": "gated_delta", "full_attention": ATTENTION}
_PLACES = {"gated_delta": "pre", ATTENTION: "post"}
RESULT_EPSILON = 1e-5
"""Epsilon of the norm of a recurrence's result, whatever ``rms_norm_eps`` says."""


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model."""
    f.refuse("attention_bias", False, "biases in attention alone")
    rotates = _rotates(f)
    if not rotates:
        f = f.changed(rope_theta=10000.0, **dict.fromkeys(TABLES))
    values = read_llama_like(
        f, hidden=3840, ffn=11008, vocab=100352, length=65536, groups=30, layers=32, heads=30, theta=10000.0,
    )
    if "num_key_value_heads" not in f.values:
        values["num_query_groups"] = values["num_attention_heads"]
    names = read_mixers(f, values["num_layers"])
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    keys = f.or_none("linear_num_key_heads", heads, heads)
    size = f.or_none("linear_key_head_dim", usual := int(0.75 * hidden / max(keys, 1)), usual)
    return values | mixers(names) | norms([_PLACES[name] for name in names]) | {
        "add_bias": False, "qk_norm": True, "qk_norm_over": "projection", "rope_pattern": () if rotates else ("none",),
        "recurrent": RecurrentConfig(
            heads=f.or_none("linear_num_value_heads", heads, heads), key_heads=keys, key_size=size,
            value_size=f.or_none("linear_value_head_dim", 2 * size, 2 * size), norm_epsilon=RESULT_EPSILON,
            kernel=f.get("linear_conv_kernel_dim", 4), negative_eigenvalues=f.get("linear_allow_neg_eigval", True),
        ),
    }


def _rotates(f: Fields) -> bool:
    """Whether attention has positions: not where the table's base or type is null."""
    table = next((found for name in TABLES if isinstance(found := f.values.get(name), dict) and found), {})
    theta = table.get("rope_theta", f.values.get("rope_theta", 10000.0))
    return theta is not None and table.get("rope_type", "default") is not None


def read_mixers(f: Fields, layers: int) -> list[str]:
    """Return the mixers of the layers that ``layer_types`` names: by default attention is in each fourth, and at least
    in the last. transformers takes no model without one of the two."""
    f.asked.add("layer_types")
    kinds = f.values.get("layer_types")
    if kinds is None:
        kinds = [("full" if layer % 4 == 3 else "linear") + "_attention" for layer in range(layers)]
        kinds[-1:] = ["full_attention"] if "full_attention" not in kinds else kinds[-1:]
    if not isinstance(kinds, list) or len(kinds) != layers or {*map(str, kinds)} != _MIXERS.keys():
        raise f.fault(f"layer_types is {kinds!r:.80}; expected {' and '.join(_MIXERS)} for {layers} layers")
    return [_MIXERS[kind] for kind in kinds]


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    r, names = model.recurrent, {ours: theirs for theirs, ours in _MIXERS.items()}
    heads, out = r.heads or model.num_attention_heads, write_llama_like(model)
    if not any(model.rotates(layer) for layer in range(model.num_layers)):
        del out["rope_theta"], out["rope_scaling"]
        out["rope_parameters"] = {"rope_type": "default", "rope_theta": None}
    return out | {
        "attention_bias": False, "layer_types": [names.get(model.mixer_of(i), "") for i in range(model.num_layers)],
        "linear_num_value_heads": heads, "linear_num_key_heads": r.key_heads or heads,
        "linear_key_head_dim": r.key_size or model.head_size, "linear_value_head_dim": r.value_size or model.head_size,
        "linear_conv_kernel_dim": r.kernel, "linear_allow_neg_eigval": r.negative_eigenvalues,
    }


# OLMo Hybrid's names: those of the published files. transformers calls the norms otherwise, and reads both. A unit of
# ours is a head of keys with its values.

OF = "linear_attn"


def packed(model: ModelConfig) -> Iterator[tuple[str, int, int]]:
    """Rows of the projection."""
    r = model.recurrent
    each = r.heads // r.key_heads
    values = each * r.value_size
    sizes = {"q": r.key_size, "k": r.key_size, "v": values, "g": values, "b": each, "a": each}
    for unit in range(r.key_heads):
        for part, rows in sizes.items():
            yield f"{OF}.{part}_proj.weight", unit * rows, rows


def convolved(model: ModelConfig) -> Iterator[tuple[str, int, int]]:
    """Channels of the convolution."""
    r = model.recurrent
    sizes = {"q": r.key_size, "k": r.key_size, "v": r.heads // r.key_heads * r.value_size}
    for unit in range(r.key_heads):
        for part, rows in sizes.items():
            yield f"{OF}.{part}_conv1d.weight", unit * rows, rows


NAMES = replace(
    OLMO2,
    mixers={"gated_delta": {
        "norm1": "attention_layer_norm", "norm2": "feedforward_layer_norm", "attention.output": f"{OF}.o_proj",
        "attention.norm": f"{OF}.o_norm",
    }},
    rows={
        "attention.packed.weight": packed, "attention.convolution.weight": convolved,
        "attention.decay": lambda model: [(f"{OF}.A_log", 0, model.recurrent.heads)],
        "attention.decay_bias": lambda model: [(f"{OF}.dt_bias", 0, model.recurrent.heads)],
    },
    convolutions=("_conv1d.weight",),
    also={"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm",
          "post_attention_layernorm": "feedforward_layer_norm"},
    loaded={"attention_layer_norm": "input_layernorm"},
    joined={f"{OF}.conv1d": tuple(f"{OF}.{part}_conv1d" for part in "qkv")},
)


FAMILY = Family(
    name="olmo_hybrid", architecture="OlmoHybridForCausalLM", read=read, write=write, names=NAMES,
    harmless=frozenset({
        "linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor",
    }),  # of initial weights
)
