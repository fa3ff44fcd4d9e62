"""Choices of a configuration: values of a ``Literal`` or of a registry, ranges, and what plugins add."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from megatron_port.core.config.ranges import Range
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.errors import ConfigError
from megatron_port.core.registry import REGISTRIES, SECTIONS, builtin_choices, unknown_choices


# Legal values of configuration fields, from their types: values of a ``Literal`` or of a registry, and ranges.
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
    **{field: own for field in {r.field: r for r in REGISTRIES} if (own := builtin_choices(field))},
}
"""The package's own values of each field that has a list, by dotted name; plugins add to those of the registries
(``registry.choices_added``)."""

RANGES = ranges_of(RunConfig)
"""Ranges of the package's own fields, by dotted name."""


@functools.cache
def limits_of(cls: type) -> tuple[dict[str, tuple[str | int, ...]], dict[str, Range]]:
    """Return choices and ranges of every field of RunConfig, or of a class of it with plugins' sections."""
    return (CHOICES, RANGES) if cls is RunConfig else ({**literal_choices(cls), **CHOICES}, ranges_of(cls))


# Import the plugins of a configuration, so that what they register may be chosen in it.
#
# Two ways lead to a plugin, a Python module that adds to :mod:`megatron_port.core.registry` when it is imported:
#
# - ``plugins = ["my_module"]`` at the top of the run file, for a module that Python finds (installed, or on
# PYTHONPATH);
# - an installed package's entry point in the group ``megatron_port.plugins``. These are looked for only where the
#   configuration chooses a name that is not known without them: the search takes longer than reading the configuration.

GROUP = "megatron_port.plugins"
"""Group of the entry points."""


def plugin_problems(values: Mapping[str, Any], origin: str, sections: Sequence[str] = ()) -> list[str]:
    """Import the plugins that a configuration needs; return what is wrong with them, a message each.

    A module is imported once a process, however many configurations name it.

    Args:
        values: dotted name → value of what the configuration sets.
        origin: where ``plugins`` is set, for messages.
        sections: names of tables that are not the package's.
    """
    found = import_problems(values.get("plugins", ()), origin)
    fields = [(r.field, name) for r in REGISTRIES for name in (r.field, f"{r.field}_pattern")]
    unknown = any(unknown_choices(field, values.get(name, ())) for field, name in fields)
    if not found and (unknown or set(sections) - set(SECTIONS.names)):
        found = installed_problems()
    return found


def import_problems(modules: Iterable[str], origin: str) -> list[str]:
    """Import modules that register something; return what is wrong with them. ``origin``: where they are named."""
    found = []
    for name in modules:
        problem = _problem(lambda name=name: importlib.import_module(name))  # type: ignore[misc]
        if problem:
            found.append(
                f"{origin}: plugin {name!r} cannot be loaded: {problem}; plugins are modules that Python finds: "
                "install the package, or add the folder that has it to PYTHONPATH"
            )
    return found


def installed_problems() -> list[str]:
    """Import the plugins of installed packages; return what is wrong with them."""
    tried = ((shown, _problem(load)) for shown, load in _entry_points())
    return [f"the installed plugin {shown} cannot be loaded: {p}; repair or uninstall it" for shown, p in tried if p]


def _entry_points() -> Iterator[tuple[str, Callable[[], Any]]]:
    from importlib.metadata import entry_points

    for entry in entry_points(group=GROUP):
        yield f"{entry.name} ({entry.value})", entry.load


def _problem(load: Callable[[], Any]) -> str:
    """Return why a plugin cannot be imported; empty: it can."""
    try:
        load()
    except ConfigError as error:  # a registry's: a name that is taken
        return str(error)
    except Exception as error:  # a module may raise anything
        return f"{type(error).__name__}: {error}"
    return ""


# Sections that few runs have (``registry.SECTIONS``), plugins' among them: a field for each in a class of RunConfig's.

def with_sections(named: Sequence[str] = ()) -> type[RunConfig]:
    """Return the class of configurations with plugins' sections, and those of the package that are ``named``.

    Raises:
        ConfigError: a section that cannot be one: its name is a setting's, or it is no dataclass with defaults.
    """
    wanted = [*(name for name in SECTIONS.builtin if name in named), *SECTIONS.added]
    return _extended(tuple((name, SECTIONS.get(name, type)) for name in wanted)) if wanted else RunConfig


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
    """Return the registered sections of a configuration that are not at their defaults, by name."""
    own = {field.name for field in dataclasses.fields(RunConfig)}
    found = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in own}
    return {name: section for name, section in found.items() if section != type(section)()}
