"""Rotary fields of a ``config.json``, resolved as transformers resolves them.

The table is called ``rope_scaling`` (transformers 4) or ``rope_parameters`` (5), and some of what it holds may also
stand beside it. Where two places contradict one another, transformers reads one of them: so do we, and note it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_port.ext.families.fields import Fields

TABLES = ("rope_scaling", "rope_parameters")
"""By the order in which transformers takes them."""
ORIGINAL_LENGTH = "original_max_position_embeddings"
_TYPES = ("default", "linear", "llama3", "yarn")
_INSTEAD = {
    "dynamic": "it changes nothing up to max_position_embeddings tokens: for such texts remove it",
    "longrope": "it has other frequencies for texts longer than original_max_position_embeddings, and this model has "
                "one set; take the family's model for short contexts, e.g. Phi-3-mini-4k",
}
_INSTEAD["su"] = _INSTEAD["longrope"]


def yarn_growth(factor: float, mscale: float = 1.0) -> float:
    """Return what YaRN multiplies queries and keys by for a context that is ``factor`` times as long."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def read_rope(f: Fields, base: str, percent: float, theta: float, *, partial: bool) -> dict[str, Any]:
    """Return the rotary fields of a model; see :meth:`Fields.rope`."""
    table = _table(f)
    f.asked.update((base, ORIGINAL_LENGTH))
    _beside(f, table, "rope_theta", base, theta)
    if base == "rope_theta":
        _beside(f, table, "partial_rotary_factor", "partial_rotary_factor", percent)
        f.asked.add("partial_rotary_factor")
    kind = table.get("rope_type", table.get("type", "default"))
    if kind not in _TYPES:
        more = f": {_INSTEAD[kind]}" if kind in _INSTEAD else ""
        raise f.fault(f"rope_type {kind!r:.80}; only default, linear, llama3 and yarn can be imported{more}")
    if kind in ("llama3", "yarn"):
        _original_length(f, table)
    rope = f.table(table)
    rope.asked.update(("rope_type", "type"))
    out = {
        "position_embedding": "rope", "rope_theta": _number(rope, "rope_theta"),
        "rotary_percent": _number(rope, "partial_rotary_factor", percent),
    }
    if not partial and out["rotary_percent"] != percent:
        raise f.fault(f"partial_rotary_factor is {out['rotary_percent']}; only {percent} can be imported")
    out |= _scaling(rope, str(kind), f) if kind != "default" else {}
    _leave_out(f, rope, table, str(kind))
    return out


def _table(f: Fields) -> dict[str, Any]:
    """Return a copy of the table that transformers reads; note one that it does not."""
    f.asked.update(TABLES)
    found = {name: f.values[name] for name in TABLES if f.values.get(name)}
    for name, table in found.items():
        if not isinstance(table, Mapping):
            raise f.fault(f"{name} is {table!r:.80}; expected a table")
    if not found:
        return {}
    name, table = next(iter(found.items()))
    other = found.get("rope_parameters", table)
    if other != table:
        f.notes.append(
            f"{f.where}: rope_scaling and rope_parameters differ; rope_scaling is read, as in transformers, and nothing"
            f" of rope_parameters, which is {dict(other)!r:.200}"
        )
    return dict(table)


def _beside(f: Fields, table: dict[str, Any], key: str, field: str, default: float) -> None:
    """Put into the table what it lacks and a field beside it has, by default ``default``; note a contradiction."""
    beside = f.values.get(field)
    if beside is None and field in f.values and key not in table and field != "partial_rotary_factor":
        raise f.fault(f"{field} is null; write the number")
    if key not in table:
        table[key] = default if beside is None else beside
    elif beside is not None and beside != table[key]:
        f.notes.append(
            f"{f.where}: {field} {beside!r:.40} is not read: the rope table has {table[key]!r:.40}, which transformers "
            "takes"
        )


def _original_length(f: Fields, table: dict[str, Any]) -> None:
    """Put the length before scaling into the table: the field beside it, where there is one, is what transformers
    takes; without either it is the context that the file names."""
    if table.get(ORIGINAL_LENGTH, 1) is not None and ORIGINAL_LENGTH in f.values:
        beside = f.values[ORIGINAL_LENGTH]
        if table.get(ORIGINAL_LENGTH, beside) != beside:
            f.notes.append(
                f"{f.where}: {ORIGINAL_LENGTH} is {table[ORIGINAL_LENGTH]!r:.40} in the rope table and {beside!r:.40} "
                "beside it; the latter is read, as in transformers"
            )
        table[ORIGINAL_LENGTH] = beside
    elif ORIGINAL_LENGTH not in table:
        table[ORIGINAL_LENGTH] = _context(f)
    length = table[ORIGINAL_LENGTH]
    if type(length) is not int or length < 1:
        raise f.fault(f"{ORIGINAL_LENGTH} is {length!r:.40}; expected the tokens of the context before scaling")


def _context(f: Fields) -> int:
    """Return the context that the file names, or its family's default."""
    default = f.known.defaults.get("max_position_embeddings", 0) if f.known else 0
    found: int = f.get("max_position_embeddings", default)
    return found


def _number(rope: Fields, name: str, default: float | None = None) -> float:
    """Return a number of the table that transformers takes as it is: null is none."""
    rope.asked.add(name)
    value = rope.values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        what = "is missing" if name not in rope.values else f"is {value!r:.60}"
        raise rope.fault(f"{name} {what}; expected a number above 0")
    return float(value)


def _scaling(rope: Fields, kind: str, f: Fields) -> dict[str, Any]:
    """Return the fields of frequencies that are scaled."""
    rope.asked.add("factor")
    if kind == "yarn" and "factor" in rope.values and rope.values["factor"] is None:
        factor = _context(f) / rope.values[ORIGINAL_LENGTH]
    else:
        factor = _number(rope, "factor")
    if factor < 1:
        raise rope.fault(f"factor is {factor}; expected at least 1")
    out: dict[str, Any] = {"rope_scaling": kind, "rope_factor": factor}
    if kind == "linear":
        return out
    rope.asked.add(ORIGINAL_LENGTH)
    out["rope_original_length"] = rope.values[ORIGINAL_LENGTH]
    if kind == "llama3":
        low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
        if high <= low:
            raise rope.fault(f"high_freq_factor {high} must be above low_freq_factor {low}")
        return out | {"rope_low_freq_factor": low, "rope_high_freq_factor": high}
    return out | _yarn(rope, factor)


def _yarn(rope: Fields, factor: float) -> dict[str, Any]:
    """Return YaRN's own fields: 0 and null are the default of the turns, null of ``truncate`` is false."""
    turns = {
        name: _number(rope, name) if rope.values.get(name) else default
        for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
    }
    rope.asked.update((*turns, "attention_factor", "mscale", "mscale_all_dim", "truncate"))
    if turns["beta_fast"] <= turns["beta_slow"]:
        raise rope.fault(f"beta_fast {turns['beta_fast']} must be above beta_slow {turns['beta_slow']}")
    return {
        "rope_beta_fast": turns["beta_fast"], "rope_beta_slow": turns["beta_slow"],
        "rope_attention_factor": _attention_factor(rope, factor),
        "rope_truncate": bool(rope.values.get("truncate", True)),
    }


def _attention_factor(rope: Fields, factor: float) -> float:
    """Return the factor on queries and keys, 0 for what ``factor`` alone makes it."""
    if rope.values.get("attention_factor") is not None:
        return _number(rope, "attention_factor")
    scales = [_number(rope, name) for name in ("mscale", "mscale_all_dim") if rope.values.get(name)]
    if len(scales) < 2:
        if scales:
            rope.notes.append(f"{rope.where}: mscale and mscale_all_dim are read together only; one alone is left out")
        return 0.0
    return yarn_growth(factor, scales[0]) / yarn_growth(factor, scales[1])


def _leave_out(f: Fields, rope: Fields, table: Mapping[str, Any], kind: str) -> None:
    """Note keys of the table that its rope type does not read. Refuse them without a rope type that scales, where
    another reads them: it may be meant. Refuse them too in a plugin's family."""
    left = {k: v for k, v in table.items() if v is not None and k not in rope.asked}
    read = {k: v for k, v in left.items() if f.known is None or (kind == "default" and k in f.known.rope)}
    if read:
        shown = ", ".join(f"{key} ({value!r:.60})" for key, value in read.items())
        raise rope.fault(
            f"unknown field {shown}: rope_type {kind} does not read it, so another may be meant; if not, remove it"
        )
    if left:
        shown = ", ".join(f"{key} ({value!r:.60})" for key, value in left.items())
        f.notes.append(f"{rope.where}: left out, since transformers' rope_type {kind} does not read it: {shown}")
