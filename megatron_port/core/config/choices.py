"""Legal values of configuration fields, from their types: values of a ``Literal`` or of a registry, and ranges."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterator
from typing import Any

from megatron_port.core.config.ranges import Range
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.registry import REGISTRIES, own_choices


def leaf_types(cls: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, type with its annotations) of every leaf, in the order of the schema."""
    hints = typing.get_type_hints(cls, include_extras=True)
    for f in dataclasses.fields(cls):
        kind = hints[f.name]
        if dataclasses.is_dataclass(kind):
            yield from leaf_types(kind, f"{prefix}{f.name}.")
        else:
            yield prefix + f.name, kind


def literal_choices(cls: Any) -> dict[str, tuple[str | int, ...]]:
    """Return the allowed values of each field of type ``Literal``, by dotted name, in the order of the schema."""
    return {n: typing.get_args(kind) for n, kind in leaf_types(cls) if typing.get_origin(kind) is typing.Literal}


def plain_type(kind: Any) -> Any:
    """Return the type of a ``Literal``'s values (all have one); any other type is returned as it is."""
    return type(typing.get_args(kind)[0]) if typing.get_origin(kind) is typing.Literal else kind


def ranges_of(cls: Any) -> dict[str, Range]:
    """Return the range of each field that has one, by dotted name, in the order of the schema."""
    return {name: note for name, kind in leaf_types(cls) for note in getattr(kind, "__metadata__", ())
            if isinstance(note, Range)}


CHOICES: dict[str, tuple[str | int, ...]] = {
    **literal_choices(RunConfig),
    **{field: own for field in {r.field: r for r in REGISTRIES} if (own := own_choices(field))},
}
"""The package's own values of each field that has a list, by dotted name; plugins add to those of the registries
(``registry.choices_added``)."""

RANGES = ranges_of(RunConfig)
"""Ranges of the package's own fields, by dotted name."""


@functools.cache
def limits_of(cls: type) -> tuple[dict[str, tuple[str | int, ...]], dict[str, Range]]:
    """Return choices and ranges of every field of RunConfig, or of a class of it with plugins' sections."""
    return (CHOICES, RANGES) if cls is RunConfig else ({**literal_choices(cls), **CHOICES}, ranges_of(cls))
