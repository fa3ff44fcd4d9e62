"""Everything that can be wrong with a configuration and seen without a device, all at once.

``check`` raises one :class:`ConfigError` with every problem; ``resolve`` fills what is derived.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_port.core.config.choices import limits_of
from megatron_port.core.config.dump import leaves
from megatron_port.core.config.layout import layout_problems, topology_sizes
from megatron_port.core.config.loader import did_you_mean
from megatron_port.core.config.neighbour import Neighbour, legal_neighbour
from megatron_port.core.config.ranges import Range
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.config.secrets import secret_problems
from megatron_port.core.config.unsupported import VALUES, not_supported
from megatron_port.core.errors import ConfigError
from megatron_port.core.registry import CONFLICTS, SECTIONS, choices_added

__all__ = ["Neighbour", "check", "legal_neighbour", "problems", "resolve", "topology_sizes"]


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
    for name in CONFLICTS.names:
        if name in SECTIONS.added and not hasattr(config, name):
            continue  # a configuration that names none of this process' plugins
        tables = CONFLICTS.get(name, tuple)
        found += [text for table in tables if not (table.sized and sizes) for text in table.problems(config)]
    found += secret_problems(config)
    neighbour = legal_neighbour(config, world_size) if sizes or layout else None
    if neighbour:
        found[-1] += f"\nThe nearest layout that is legal: {neighbour}."
    return found


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
            refused = not_supported(str(value), VALUES.get(name, {}))
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


def _quoted(value: Any) -> str:
    return repr(value) if isinstance(value, str) else str(value)
