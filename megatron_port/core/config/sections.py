"""Sections of the configuration that plugins register (``registry.SECTIONS``): a field of RunConfig for each."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.errors import ConfigError
from megatron_port.core.registry import SECTIONS


def with_sections() -> type[RunConfig]:
    """Return the class of configurations with every registered section; RunConfig where there is none.

    Raises:
        ConfigError: a section that cannot be one: its name is a setting's, or it is no dataclass with defaults.
    """
    added = tuple((name, SECTIONS.get(name, type)) for name in SECTIONS.added)
    return _extended(added) if added else RunConfig


@functools.cache  # one class for the same sections, so that equal configurations compare equal
def _extended(sections: tuple[tuple[str, type], ...]) -> type[RunConfig]:
    own = {field.name for field in dataclasses.fields(RunConfig)}
    fields: list[tuple[str, type, Any]] = []
    for name, section in sections:
        if name in own:
            raise ConfigError(f"section {name!r} is megatron_port's own; register the plugin's under another name")
        try:
            hash(section())
        except TypeError as error:
            raise ConfigError(f"section {name!r}: {section.__name__} must be a frozen dataclass with a default for "
                              f"each field ({error})") from error
        fields.append((name, section, dataclasses.field(default_factory=section)))
    return dataclasses.make_dataclass("RunConfig", fields, bases=(RunConfig,), frozen=True, kw_only=True)


def added_sections(config: RunConfig) -> dict[str, Any]:
    """Return the sections of plugins in a configuration that are not at their defaults, by name."""
    own = {field.name for field in dataclasses.fields(RunConfig)}
    found = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in own}
    return {name: section for name, section in found.items() if section != type(section)()}
