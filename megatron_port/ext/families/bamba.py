"""Bamba: layers of Mamba-2 and a few of attention, half of whose heads rope rotates; an MLP in all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_port.core.config.model import ATTENTION, RecurrentConfig
from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families.family import TABLES, Family, Fields
from megatron_port.ext.families.llama import NAMES as LLAMA
from megatron_port.ext.families.mamba2 import (
    CHUNKS,
    CONVOLUTIONS,
    HARMLESS,
    MIXER,
    check_width,
    expansion,
    limit_there,
    modules_of,
    read_limit,
    rows_of,
)
from megatron_port.ext.families.settings import mixers
from megatron_port.ext.families.shared import one_bias, read_llama_like, write_llama_like

ROTATED = 0.5
"""Share of a head that rope rotates, unless the rope table has another."""


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model."""
    values = read_llama_like(
        with_rotated(f), hidden=4096, ffn=14336, vocab=128000, length=262144, groups=8, epsilon=1e-5, partial=True,
    )
    layers = values["num_layers"]
    indices = f.or_none("attn_layer_indices", list[int](), list[int]())
    kinds = [ATTENTION if layer in indices else MIXER for layer in range(layers)]
    if MIXER not in kinds:
        raise f.fault(f"attn_layer_indices leaves none of {layers} layers to Mamba-2; such a model is another family's")
    return values | {"add_bias": one_bias(f)} | read_recurrent(f, values["hidden_size"], kinds)


def with_rotated(f: Fields) -> Fields:
    """Return the fields with the share that is rotated where the rope table lacks it; transformers reads no field
    beside the table."""
    beside = f.values.get("partial_rotary_factor")
    if beside not in (None, ROTATED):
        f.notes.append(f"{f.where}: partial_rotary_factor {beside!r:.40} is not read: transformers takes that of the "
                       f"rope table, or {ROTATED}")
    tables = (f.values.get(name) for name in TABLES)
    there = any(isinstance(table, Mapping) and "partial_rotary_factor" in table for table in tables)
    return f.changed(partial_rotary_factor=None if there else ROTATED)


def read_recurrent(f: Fields, hidden: int, kinds: Sequence[str]) -> dict[str, Any]:
    """Return the mixers and the sizes of Mamba-2 in Bamba and in Granite 4."""
    f.refuse("mamba_proj_bias", False, "biases of the projections of Mamba-2")
    heads, expand = f.get("mamba_n_heads", 128), f.get("mamba_expand", 2)
    if heads < 1:
        raise f.fault(f"mamba_n_heads is {heads}; expected at least 1")
    f.asked.update(("mamba_d_head", *CHUNKS))
    width = f.values.get("mamba_d_head", "auto")
    low, high = read_limit(f)
    recurrent = RecurrentConfig(
        heads=heads, key_heads=f.get("mamba_n_groups", 1), key_size=f.get("mamba_d_state", 256),
        value_size=expand * hidden // heads if width == "auto" else f.get("mamba_d_head", 0),
        kernel=f.get("mamba_d_conv", 4), convolution_bias=f.get("mamba_conv_bias", True), step_min=low, step_max=high,
    )
    if MIXER not in kinds:
        return mixers(kinds) | {"recurrent": RecurrentConfig()}
    check_width(f, recurrent, hidden, expand, "mamba_n_heads × mamba_d_head")
    return mixers(kinds) | {"recurrent": recurrent}


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    out = write_llama_like(model)
    if model.rotary_percent != ROTATED:
        table = out["rope_scaling"] or {"rope_type": "default"}
        out["rope_scaling"] = {**table, "partial_rotary_factor": model.rotary_percent}
    return out | write_recurrent(model) | {
        "attention_bias": model.add_bias, "mlp_bias": model.add_bias,
        "attn_layer_indices": [i for i in range(model.num_layers) if model.mixer_of(i) == ATTENTION],
    }


def write_recurrent(model: ModelConfig) -> dict[str, Any]:
    """Fields of Mamba-2 in Bamba and in Granite 4."""
    r = model.recurrent
    if MIXER not in model.mixers:
        return {"mamba_n_heads": 1, "mamba_d_head": "auto"}  # transformers wants sizes that divide
    return limit_there(r) | {
        "mamba_n_heads": r.heads, "mamba_d_head": r.value_size, "mamba_n_groups": r.key_heads,
        "mamba_d_state": r.key_size, "mamba_d_conv": r.kernel, "mamba_expand": expansion(model),
        "mamba_conv_bias": r.convolution_bias, "mamba_proj_bias": False,
    }


NAMES = replace(
    LLAMA, outside={**LLAMA.outside, "final_norm": "final_layernorm"},
    inside={
        **LLAMA.inside, "norm2": "pre_ff_layernorm", "mlp.up": ("feed_forward.gate_proj", "feed_forward.up_proj"),
        "mlp.down": "feed_forward.down_proj",
    },
    mixers=modules_of("mamba"), rows=rows_of("mamba"), convolutions=CONVOLUTIONS, rotation="first", buffers=(),
)


FAMILY = Family(
    name="bamba", architecture="BambaForCausalLM", read=read, write=write, names=NAMES,
    harmless=HARMLESS | {"z_loss_coefficient"},  # of a loss that transformers makes of labels
)
