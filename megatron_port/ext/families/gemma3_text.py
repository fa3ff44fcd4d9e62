"""Gemma 3 (text): Gemma 2's layer with normed heads in place of bounded scores, windows in five of six layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families import shared as gemma_like
from megatron_port.ext.families.family import ORIGINAL_LENGTH, TABLES, Family, Fields, rope_scaling
from megatron_port.ext.families.gemma2 import NAMES as GEMMA2
from megatron_port.ext.families.shared import read_gemma_like, write_gemma_like

HARMLESS = gemma_like.GEMMA_HARMLESS | {"_sliding_window_pattern"}  # of which layer_types was made
_KINDS = ("full_attention", "sliding_attention")


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model."""
    period = max(f.get("sliding_window_pattern", 6), 1)
    types = ("sliding_attention",) * (period - 1) + ("full_attention",)
    values = read_gemma_like(f, vocab=262208, length=131072, types=types, caps=(0.0, 0.0))
    return values | {"qk_norm": True, **_positions(f, bool(values.get("sliding_window")))}


def _positions(f: Fields, windows: bool) -> dict[str, Any]:
    """Rotary fields, from a table for each kind of layers (transformers 5) or the fields that were before it."""
    tables, scaling = f.values.get("rope_parameters") or {}, f.values.get("rope_scaling") or {}
    if not isinstance(tables, Mapping) or not all(isinstance(tables.get(kind) or {}, Mapping) for kind in _KINDS):
        raise f.fault(f"rope_parameters is {tables!r:.80}; expected a table for each of {', '.join(_KINDS)}")
    if not isinstance(scaling, Mapping):
        raise f.fault(f"rope_scaling is {scaling!r:.80}; expected a table")
    Fields(tables, f"{f.where}, rope_parameters", set(_KINDS)).refuse_unknown(tables, ())
    full, window = (dict(tables.get(kind) or {}) for kind in _KINDS)
    if differing := [key for key, value in scaling.items() if full.get(key, value) != value]:
        f.notes.append(
            f"{f.where}: {', '.join(differing)} of rope_scaling replace those of rope_parameters, as in transformers"
        )
    values = {k: v for k, v in f.values.items() if k not in (*TABLES, ORIGINAL_LENGTH)}
    values |= {"rope_parameters": {"rope_type": "default", **full, **scaling}}
    if values["rope_parameters"].get("truncate", True) is not True:
        raise f.fault("truncate of a table for layers without a window: transformers does not read it there; remove it")
    full_fields = Fields(values, f.where, f.asked, known=f.known, notes=f.notes)
    out = full_fields.rope("rope_theta", 1.0, 1000000.0)
    values |= {"rope_parameters": {"rope_type": "default", **window}, "rope_theta": values.get("rope_local_base_freq")}
    local = Fields({k: v for k, v in values.items() if v is not None}, f.where, f.asked, known=f.known, notes=f.notes)
    theirs = local.rope("rope_theta", 1.0)
    if "rope_scaling" in theirs:
        raise f.fault(f"rope_type {theirs['rope_scaling']!r} of layers with a window; only default can be imported")
    f.asked.add("rope_local_base_freq")
    return out | {"window_rope_theta": theirs["rope_theta"] if windows else 0.0}


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    local = {"rope_local_base_freq": model.window_rope_theta or model.rope_theta}
    return write_gemma_like(model) | rope_scaling(model) | local


# Gemma 3's names: Gemma 2's, and the norms of query and key heads.

_NORMS = {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}
NAMES = replace(GEMMA2, inside={**GEMMA2.inside, **_NORMS})


FAMILY = Family(
    name="gemma3_text", architecture="Gemma3ForCausalLM", read=read, write=write, names=NAMES, harmless=HARMLESS
)
