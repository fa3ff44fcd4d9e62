"""Import the plugins of a configuration, so that what they register may be chosen in it.

Two ways lead to a plugin, a Python module that adds to :mod:`megatron_port.core.registry` when it is imported:

- ``plugins = ["my_module"]`` at the top of the run file, for a module that Python finds (installed, or on PYTHONPATH);
- an installed package's entry point in the group ``megatron_port.plugins``. These are looked for only where the
  configuration chooses a name that is not known without them: the search takes longer than reading the configuration.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from megatron_port.core.errors import ConfigError
from megatron_port.core.registry import REGISTRIES, SECTIONS, unknown_choices

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
    unknown = any(unknown_choices(r.field, values.get(r.field, ())) for r in REGISTRIES)
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
