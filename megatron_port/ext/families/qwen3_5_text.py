"""Qwen3.5's language model: Qwen3-Next's layers without experts, their projections in matrices of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families.family import TABLES, Family, Fields
from megatron_port.ext.families.qwen3_next import NAMES as QWEN3_NEXT
from megatron_port.ext.families.qwen3_next import (
    OF,
    convolved,
    read_mixers,
    read_recurrent,
    write_recurrent,
)
from megatron_port.ext.families.settings import mixers
from megatron_port.ext.families.shared import read_llama_like, write_llama_like

_AXES = ("mrope_section", "mrope_interleaved")
"""Which elements turn by an image's axes: those of a text are all its position."""


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model."""
    f.refuse("attention_bias", False, "biases in attention alone")
    tables = {name: f.values[name] for name in TABLES if isinstance(f.values.get(name), Mapping)}
    f = f.changed(
        partial_rotary_factor=f.get("partial_rotary_factor", 0.25),
        **{name: {k: v for k, v in table.items() if k not in _AXES} for name, table in tables.items()},
    )
    values = read_llama_like(
        f, hidden=4096, ffn=12288, vocab=248320, length=32768, groups=4, head=256, layers=32, heads=16, partial=True,
    )
    return values | mixers(read_mixers(f, values["num_layers"])) | {
        "add_bias": False, "qk_norm": True, "norm_zero_centered": True, "attention_gate": True,
        "recurrent": read_recurrent(f),
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    return write_llama_like(model) | write_recurrent(model) | {
        "attention_bias": False, "partial_rotary_factor": model.rotary_percent,
    }


# Qwen3.5's names: Qwen3-Next's, without experts.

def packed(model: ModelConfig) -> Iterator[tuple[str, int, int]]:
    """Rows of the projection: of each unit what four matrices there have."""
    r = model.recurrent
    each, qkv = r.heads // r.key_heads, list(convolved(model))
    for unit in range(r.key_heads):
        yield from ((f"{OF}.in_proj_qkv.weight", first, rows) for _, first, rows in qkv[3 * unit : 3 * unit + 3])
        for part, rows in (("z", each * r.value_size), ("b", each), ("a", each)):
            yield f"{OF}.in_proj_{part}.weight", unit * rows, rows


NAMES = replace(QWEN3_NEXT, rows={**QWEN3_NEXT.rows, "attention.packed.weight": packed})


FAMILY = Family(name="qwen3_5_text", architecture="Qwen3_5ForCausalLM", read=read, write=write, names=NAMES)
