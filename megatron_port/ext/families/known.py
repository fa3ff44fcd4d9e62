"""Which fields of a config.json transformers reads, family by family.

Derived from its sources by ``scripts/transformers_fields.py``; transformers itself is not needed here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("transformers_fields.json")


@dataclass(frozen=True)
class Known:
    """Fields of a family in transformers."""

    version: str
    """Version of the transformers whose sources were read."""
    read: frozenset[str]
    """Fields that its model, its configuration or what these use may read, by any of their names."""
    defaults: Mapping[str, Any]
    """Default of each field that its configuration's class has, tables left out."""
    rope: frozenset[str]
    """Keys that the model, or some rope type, reads from a rope table."""

    def default(self, name: str, value: Any) -> bool:
        """Whether this is a field's default, of the same type."""
        default = self.defaults.get(name)
        return default is not None and type(default) is type(value) and default == value

    def inert(self, name: str, value: Any) -> bool:
        """Whether a field changes nothing: transformers does not read it, or this is its default."""
        return name not in self.read or self.default(name, value)

    def older_than(self, version: Any) -> bool:
        """Whether a file is of a later transformers than the one that was read: its fields may be new."""
        return isinstance(version, str) and _numbers(version) > _numbers(self.version)


def _numbers(version: str) -> tuple[int, ...]:
    """Return 5, 23 of "5.23.0.dev1", since patches add no fields; nothing of what is no version."""
    found = re.match(r"(\d{1,9})\.(\d{1,9})", version)
    return (int(found[1]), int(found[2])) if found else ()


@cache
def _table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_bytes())
    return found


def known_fields(family: str) -> Known | None:
    """Return the fields of a family; None: it is a plugin's, of which nothing is known."""
    table = _table()
    found = table["families"].get(family)
    if found is None:
        return None
    read = {*table["read"], *found["read"]}
    for pair in found["aliases"].items():
        read |= {*pair} if read.intersection(pair) else set()
    return Known(table["transformers"], frozenset(read), found["defaults"], frozenset(found["rope"]))
