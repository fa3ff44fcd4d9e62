"""What a manifest may hold beside its files and pieces: one table of fields and their types.

A manifest's hash finds damage, not a writer with other ideas, so nothing is used before its type and range are known:
a count is an integer that fits 63 bits, a number is finite, a text is short. Fields that the table does not know are
left alone. To add one, add a line here; unless ``_REQUIRED`` names it, manifests without it are still read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from megatron_port.core.errors import CheckpointError

MAX_COUNT = 1 << 63
MAX_TEXT = 4096
MAX_DEPTH = 32
_LAST_SECOND = 1e11
"""Clock time in the year 5138, in seconds: still a date for every C library."""

_Type = tuple[Callable[[Any], bool], str]


def is_count(value: Any) -> bool:
    """An integer from 0 to 2^63 - 1 (``True`` is none)."""
    return type(value) is int and 0 <= value < MAX_COUNT


def is_number(value: Any) -> bool:
    """Finite, and convertible to a float."""
    return type(value) in (int, float) and abs(value) < 1e308


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT


def _is_word(value: Any) -> bool:
    return _is_text(value) and value.isprintable()


def _list_of(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(test, value))


COUNT: _Type = (is_count, "an integer from 0 to 2^63 - 1")
INTEGER: _Type = ((lambda x: type(x) is int and abs(x) < MAX_COUNT), "an integer of less than 64 bits")
NUMBER: _Type = (is_number, "a finite number")
POSITIVE: _Type = ((lambda x: is_number(x) and x > 0), "a finite number above 0")
SECONDS: _Type = ((lambda x: is_number(x) and 0 <= x < _LAST_SECOND), "seconds since 1970")
WORD: _Type = (_is_word, f"a text of at most {MAX_TEXT} printable characters")
NAME: _Type = (lambda x: _is_word(x) and len(x) <= 256, "a text of at most 256 printable characters")
TEXT: _Type = (_is_text, f"a text of at most {MAX_TEXT} characters")
TEXT_OR_NULL: _Type = (lambda x: x is None or _is_text(x), f"null or a text of at most {MAX_TEXT} characters")
TABLE: _Type = (lambda x: isinstance(x, dict), "an object")
TABLES: _Type = (_list_of(lambda x: isinstance(x, dict)), "a list of objects")
NUMBERS: _Type = (_list_of(is_number), "a list of finite numbers")
COUNTS: _Type = (_list_of(is_count), "a list of integers from 0 to 2^63 - 1")
WORDS: _Type = (_list_of(_is_word), f"a list of texts of at most {MAX_TEXT} printable characters")
SPANS: _Type = (
    _list_of(lambda x: isinstance(x, list) and len(x) == 2 and all(map(is_count, x))), "a list of [first, count]",
)

FIELDS: dict[str, _Type] = {
    "step": COUNT, "samples": COUNT, "tokens": COUNT, "saved_at": SECONDS,
    "versions": TABLE, "versions.*": TEXT,
    "layout": TABLE,
    "layout.tensor_parallel_size": COUNT, "layout.pipeline_parallel_size": COUNT,
    "layout.virtual_pipeline_size": COUNT, "layout.data_parallel_size": COUNT, "layout.zero_stage": COUNT,
    "config": TABLE,
    "config.model": TABLE, "config.layout": TABLE, "config.batch": TABLE, "config.precision": TABLE,
    "config.optimizer": TABLE, "config.data": TABLE, "config.engine": WORD, "config.precision.dtype": WORD,
    "scalars": TABLE, "scalars.*": NUMBER,
    "scalars.optimizer_steps": COUNT, "scalars.loss_scale": POSITIVE, "scalars.loss_scale_good_steps": COUNT,
    "scalars.loss_scale_hysteresis_left": INTEGER, "scalars.skipped_in_a_row": COUNT,
    "extra": TABLE,
    "extra.skipped_total": COUNT, "extra.tokenizer": TEXT_OR_NULL, "extra.imported_from": TEXT,
    "extra.compressed": TABLE,
    "extra.base": TABLE, "extra.base.fingerprint": WORD, "extra.base.path": TEXT,
    "extra.teacher": TABLE, "extra.teacher.fingerprint": WORD, "extra.teacher.path": TEXT,
    "extra.numerics": TABLE, "extra.numerics.losses": NUMBERS, "extra.numerics.grad_norms": NUMBERS,
    "extra.numerics.anomaly_steps": COUNTS, "extra.numerics.anomalies_total": COUNT,
    "extra.numerics.first_loss": NUMBER,
    "extra.numerics.left_out": SPANS,
    # Version 2.
    "rng": TABLE, "data": TABLE, "data.corpora": TABLES, "schedule": TABLE, "config_hash": WORD,
    "tokenizer": TABLE, "tokenizer.name": TEXT, "tokenizer.hash": TEXT, "tokenizer.eod_id": NUMBER,
    "kinds": TABLE, "kinds.*": WORDS,
    # Version 3, where there are any.
    "shapes": TABLE, "shapes.*": TABLE, "shapes.*.*": COUNTS,
    # Which run wrote it, and after which commit of that run.
    "lineage": TABLE, "lineage.run": NAME, "lineage.commit": COUNT, "lineage.epoch": COUNT, "lineage.attempt": NAME,
    "lineage.parent": TABLE, "lineage.parent.run": NAME, "lineage.parent.commit": COUNT, "lineage.parent.step": COUNT,
}
"""Dotted path → type. ``*`` stands for every key of an object."""

_REQUIRED = {
    1: ("step", "samples", "tokens", "saved_at", "layout", "config", "scalars", "extra", "versions"),
    2: ("rng", "data", "schedule", "config_hash", "tokenizer"),
}
"""Version → fields that it brought and that all its manifests have."""


def field_fault(body: Mapping[str, Any], version: int) -> str | None:
    """Return the fault of a manifest's fields other than ``files`` and ``pieces``, or None."""
    for since, names in _REQUIRED.items():
        for name in names:
            if since <= version and name not in body:
                return f"it has no {name}"
    for path, (test, expected) in FIELDS.items():
        for name, value in _at(body, path.split("."), ""):
            if not test(value):
                return f"{name} is {shown(value)}; expected {expected}"
    for name, value in body.items():
        if name not in ("files", "pieces"):
            fault = _value_fault(value, name, MAX_DEPTH)
            if fault:
                return fault
    return None


def shown(value: Any) -> str:
    """A value of a manifest for a message: short, whatever it is."""
    try:
        return f"{value!r:.60}"
    except (ValueError, RecursionError):  # an integer of more digits than Python prints, or nested without end
        return f"a {type(value).__name__} too long to print"


def _at(table: Mapping[str, Any], path: list[str], before: str) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of what is at a path; nothing where it is absent."""
    first, *rest = path
    for key in table if first == "*" else (first,) if first in table else ():
        name, value = f"{before}{key}", table[key]
        if not rest:
            yield name, value
        elif isinstance(value, dict):
            yield from _at(value, rest, f"{name}.")


def _value_fault(value: Any, where: str, depth: int) -> str | None:
    """Numbers that are none, and nesting that nothing of ours has."""
    if isinstance(value, float) and not is_number(value):
        return f"{where} is {value}; expected a finite number"
    if isinstance(value, (dict, list)):
        if not depth:
            return f"{where[:200]} is nested more than {MAX_DEPTH} deep"
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            fault = _value_fault(inner, f"{where}.{key}"[:300], depth - 1)
            if fault:
                return fault
    return None


def plain(value: Any) -> Any:
    """``value`` as JSON holds it: dataclasses and mappings become dicts, tuples lists.

    Raises:
        CheckpointError: something in it is not a JSON value; the message names where it is.
    """
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    return _plain(value, "")


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) and value - value == 0.0:
        return float(value)
    raise CheckpointError(
        f"{where.lstrip('.') or 'value'} is {value!r:.80} ({type(value).__name__}); a manifest holds only finite "
        "numbers, strings, booleans, lists and dicts: convert it before saving"
    )
