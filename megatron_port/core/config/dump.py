"""Writing a configuration: plain dictionaries, TOML."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any


def as_dict(config: Any) -> dict[str, Any]:
    """Nested plain dictionaries; tuples become lists."""
    out: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            value = as_dict(value)
        elif isinstance(value, tuple):
            value = [as_dict(entry) if dataclasses.is_dataclass(entry) else entry for entry in value]
        out[f.name] = value
    return out


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``(dotted name, value)`` of every leaf, in the order of the schema."""
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{f.name}.")
        else:
            yield prefix + f.name, value


def toml_value(value: Any) -> str:
    """One value as TOML source. Floats keep every bit (repr), strings are escaped as TOML 1.0 asks."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + "".join(_escape(c) for c in value) + '"'
    if isinstance(value, (int, float)):
        return repr(value)
    if dataclasses.is_dataclass(value):
        return "{ " + ", ".join(f"{key} = {toml_value(v)}" for key, v in leaves(value)) + " }"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    raise ValueError(f"no TOML form for a {type(value).__name__}")


def _escape(char: str) -> str:
    short = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    if char in short:
        return short[char]
    if ord(char) < 32 or ord(char) == 127:
        return f"\\u{ord(char):04x}"
    return char


def to_toml(config: Any, comments: Mapping[str, str] | None = None) -> str:
    """The whole configuration as TOML, loadable again to an equal object.

    ``comments``: a trailing comment for each dotted leaf name (``Loaded.origins``, or help texts).
    """
    comments = comments or {}
    groups: dict[str, list[tuple[str, str]]] = {"": []}
    for name, value in leaves(config):
        table, _, key = name.rpartition(".")
        groups.setdefault(table, []).append((f"{key} = {toml_value(value)}", comments.get(name, "")))
    blocks = []
    for table, rows in groups.items():
        lines = [f"[{table}]"] if table else []
        width = max((len(text) for text, note in rows if note and len(text) <= 48), default=0)
        for text, note in rows:
            lines.append(f"{text:<{width}}  # {' '.join(note.split())}" if note else text)
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"
