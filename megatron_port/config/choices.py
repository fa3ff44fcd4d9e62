"""The values that a configuration field may take: of its ``Literal`` type, or of the registry that plugins add to."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from megatron_port.config.schema import RunConfig
from megatron_port.registry import REGISTRIES


def literal_choices(cls: Any, prefix: str = "") -> dict[str, tuple[str | int, ...]]:
    """Return the allowed values of each field of type ``Literal``, by dotted name, in the order of the schema."""
    hints = typing.get_type_hints(cls)
    out: dict[str, tuple[str | int, ...]] = {}
    for f in dataclasses.fields(cls):
        kind = hints[f.name]
        if dataclasses.is_dataclass(kind):
            out.update(literal_choices(kind, f"{prefix}{f.name}."))
        elif typing.get_origin(kind) is typing.Literal:
            out[prefix + f.name] = typing.get_args(kind)
    return out


def plain_type(kind: Any) -> Any:
    """Return the type of a ``Literal``'s values (all have one); any other type is returned as it is."""
    return type(typing.get_args(kind)[0]) if typing.get_origin(kind) is typing.Literal else kind


CHOICES: dict[str, tuple[str | int, ...]] = {
    **literal_choices(RunConfig), **{registry.field: registry.builtin for registry in REGISTRIES}
}
"""The package's own values of each field that has a list, by dotted name; plugins add to those of the registries
(``registry.choices_added``)."""
