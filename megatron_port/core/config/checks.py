"""Everything that can be wrong with a configuration and seen without a device, all at once.

``check`` raises one :class:`ConfigError` with every problem; ``resolve`` fills what is derived.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron_port.core.config.choices import limits_of
from megatron_port.core.config.conflicts import Table, value_of
from megatron_port.core.config.dump import leaves
from megatron_port.core.config.layout import layout_problems, topology_sizes
from megatron_port.core.config.loader import did_you_mean
from megatron_port.core.config.ranges import Range, shaped
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.errors import ConfigError
from megatron_port.core.registry import ALWAYS, CONFLICTS, PARTS, SECTIONS, choices_added

__all__ = ["check", "problems", "resolve", "topology_sizes"]

_PLAIN = {name: value_of(RunConfig(), name) for name in CONFLICTS.builtin if name not in (ALWAYS, *SECTIONS.names)}
"""Values of the settings that ask for a feature, where they do not."""


def check(config: RunConfig, *, world_size: int | None = None) -> None:
    """Raise one ConfigError with every problem; the nearest legal layout closes it where the split is at fault.

    ``world_size`` None: cluster.nodes × gpus_per_node if given, else whatever the layout multiplies to.
    """
    found = problems(config, world_size=world_size)
    if found:
        raise ConfigError(found)


def problems(config: RunConfig, *, world_size: int | None = None) -> list[str]:
    """Return what ``check`` would raise, as a list."""
    kind: Any = type(config)  # with the sections of plugins
    choices, ranges = limits_of(kind)
    sizes, others = _out_of_range(config, ranges)
    layout = [] if sizes else layout_problems(config, world_size)
    found = [*_unknown_choices(config, choices), *sizes, *others, *layout]
    found += [text for table in tables_of(config) if not (table.sized and sizes) for text in table.problems(config)]
    found += secret_problems(config)
    neighbour = PARTS.function("nearest legal layout")(config, world_size) if sizes or layout else None
    if neighbour:
        found[-1] += f"\nThe nearest layout that is legal: {neighbour}."
    return found


def tables_of(config: RunConfig) -> Iterator[Table]:
    """Yield the tables of what a configuration asks for (``registry.CONFLICTS``). Others are not even imported: a
    feature that nobody asks for contradicts nothing."""
    seen: set[int] = set()
    for name in CONFLICTS.names:
        if name in SECTIONS.names and not hasattr(config, name):
            continue  # a configuration that names none of them
        if name in _PLAIN and value_of(config, name) == _PLAIN[name]:
            continue
        tables = CONFLICTS.get(name, tuple)
        if id(tables) not in seen:  # several settings may ask for the same
            seen.add(id(tables))
            yield from tables


def resolve(config: RunConfig, world_size: int | None = None) -> RunConfig:
    """A copy with every derived size filled in: replicas, key/value heads, head size, MLP width, decay_steps.

    Raises:
        ConfigError: the layout does not multiply to the world.
    """
    _, _, dp = topology_sizes(config, world_size)
    m = config.model
    return replace(
        config,
        model=replace(m, num_query_groups=m.kv_heads, head_dim=m.head_size, ffn_hidden_size=m.ffn_size),
        layout=replace(config.layout, data_parallel_size=dp),
        optimizer=replace(config.optimizer, decay_steps=config.optimizer.decay_steps or config.training.steps),
    )


def _unknown_choices(config: RunConfig, choices_of: Mapping[str, tuple[str | int, ...]]) -> list[str]:
    out, values = [], dict(leaves(config))
    for name, own in choices_of.items():
        allowed, value = (*own, *choices_added(name)), values[name]
        if value not in allowed:
            choices = [str(a) for a in allowed]
            refused = PARTS.function("name in another framework")(str(value), of=name)
            # A word with another first letter is more likely another word than a misspelt one: relu, gelu.
            alike = [c for c in choices if c[:1] == str(value).lower()[:1]]
            near = did_you_mean(value, alike) if isinstance(value, str) and not refused else ""
            out.append(f"{name} {_quoted(value)}{refused or ' is unknown'}; use {', '.join(choices)}{near}")
    return out


def _out_of_range(config: RunConfig, ranges: Mapping[str, Range]) -> tuple[list[str], list[str]]:
    """Return a sentence for each size of the split that is out of its range, and for each other setting."""
    values = dict(leaves(config))
    wrong = {name: legal for name, legal in ranges.items() if not legal.holds(values[name])}
    sizes, others = ([
        f"{name} is {_quoted(values[name])}; it must be {legal.words}"
        for name, legal in wrong.items() if legal.is_size == size
    ] for size in (True, False))
    return sizes, others


def secret_problems(config: RunConfig) -> list[str]:
    """Values that should not be in a file that every checkpoint copies; the secret itself is not repeated."""
    out = []
    for name, value in leaves(config):
        texts = value if isinstance(value, (list, tuple)) else (value,)
        if any(isinstance(text, str) and shaped(text) != text for text in texts):
            out.append(
                f"{name} holds what looks like a password or an access key, and configurations are copied into "
                "config.toml, job scripts and every checkpoint; take it out, and hand it on in the environment or in a "
                "file that only you can read (~/.netrc)"
            )
    return out


def _quoted(value: Any) -> str:
    return repr(value) if isinstance(value, str) else str(value)
