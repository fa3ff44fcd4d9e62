"""Families of Hugging Face: one file each, with its configuration and its names; shapes are in ``configs/models``.

To add one: write the file (``qwen3.py`` is the shortest example) and its line in ``registry.FAMILIES``; a plugin adds
its own to the same registry (CONTRIBUTING.md). Import, export, the logits' check, the planner and the tests in
``tests/unit/test_families.py`` go over the registry. What a family needs of a layer that no other has is a spec
(``core/model/spec.py``) and the code that computes it.
"""

from __future__ import annotations

from megatron_port.core.errors import ConfigError
from megatron_port.core.registry import FAMILIES
from megatron_port.ext.families.family import Family

AUTO = "auto"


def family_names() -> tuple[str, ...]:
    """Return the ``model_type`` of every registered family, the package's own first."""
    return tuple(name for name in FAMILIES.names if name != AUTO)


def family_named(name: str) -> Family:
    """Return the family of a ``model_type``.

    Raises:
        ConfigError: there is none of that name, its module cannot be imported, or it is registered under another name.
    """
    found = FAMILIES.get(name, Family)
    if found.name != name:
        raise ConfigError(f"model family {name!r} has model_type {found.name!r}; register it under its model_type")
    return found
