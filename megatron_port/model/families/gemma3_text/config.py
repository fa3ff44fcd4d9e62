"""Gemma 3's config.json, of a text model: layers with a window have rotary frequencies of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_port.config.schema import ModelConfig
from megatron_port.model.families import gemma_like
from megatron_port.model.families.fields import Fields, rope_scaling
from megatron_port.model.families.gemma_like import read_gemma_like, write_gemma_like

HARMLESS = gemma_like.HARMLESS | {"_sliding_window_pattern"}  # of which layer_types was made
_KINDS = ("full_attention", "sliding_attention")


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model."""
    period = max(f.get("sliding_window_pattern", 6), 1)
    types = ("sliding_attention",) * (period - 1) + ("full_attention",)
    values = read_gemma_like(f, vocab=262208, length=131072, types=types, caps=(0.0, 0.0))
    return values | {"qk_norm": True, **_positions(f, bool(values.get("sliding_window")))}


def _positions(f: Fields, windows: bool) -> dict[str, Any]:
    """Rotary fields, from a table for each kind of layers (transformers 5) or the fields that were before it."""
    tables = f.values.get("rope_parameters") or {}
    if not isinstance(tables, Mapping) or not all(isinstance(tables.get(kind) or {}, Mapping) for kind in _KINDS):
        raise f.fault(f"rope_parameters is {tables!r:.80}; expected a table for each of {', '.join(_KINDS)}")
    where = f"{f.where}, rope_parameters"
    Fields(tables, where, set(_KINDS)).refuse_unknown(tables, ())
    full, window = (dict(tables.get(kind) or {}) for kind in _KINDS)
    out = Fields({**f.values, "rope_parameters": full}, f.where, f.asked).rope("rope_theta", 1.0, 1000000.0)
    local = Fields({"rope_theta": f.values.get("rope_local_base_freq"), **window}, where)
    local.refuse("rope_type", "default", "scaled frequencies of layers with a window")
    f.asked.add("rope_local_base_freq")
    theta = local.get("rope_theta", 10000.0)
    local.refuse_unknown(window, ())
    return out | {"window_rope_theta": theta if windows else 0.0}


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    local = {"rope_local_base_freq": model.window_rope_theta or model.rope_theta}
    return write_gemma_like(model) | rope_scaling(model) | local
