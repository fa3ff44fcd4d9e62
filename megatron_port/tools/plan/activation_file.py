"""The file in a run's folder that holds its plan of activations, and for which run it was made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.errors import ConfigError
from megatron_port.core.io.files import read_regular, write_text
from megatron_port.core.io.typed_json import Natural, WrongContent, parse_json, typed
from megatron_port.ext.memory.sites import decided

NAME = "activation_plan.json"
VERSION = 1
MOST_CHARACTERS = 1 << 19


@dataclass(frozen=True, kw_only=True)
class PlanRecord:
    """A plan and where it comes from."""

    key: str
    """Key of the run that it is for; see :func:`key_of`."""
    source: Literal["planned", "measured"]
    layers: tuple[str, ...]
    """As activations.layers."""
    stages: tuple[str, ...]
    """A line for each run of stages that choose the same."""
    step: Natural = 0
    """Steps done when it was made."""
    measures: tuple[tuple[float, ...], ...] = ()
    """By stage (``StageMeasures.row``), where it was measured."""


def key_of(config: RunConfig) -> str:
    """Return a digest of what a plan depends on: model, layout, batch, precision, kernels, offload, device, budget.

    ``config``: resolved, so that an elastic run that comes back on other ranks has another key.
    """
    a, cluster = config.activations, config.cluster
    parts = [
        asdict(config.model), asdict(config.layout), asdict(config.batch), asdict(config.precision),
        asdict(config.backend), asdict(config.offload), config.engine, asdict(config.hardware),
        [a.policy, a.budget, cluster.memory_gb, cluster.name],
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def write(folder: Path, record: PlanRecord, guard: Callable[[], None] | None = None) -> None:
    """Write a plan into a run's folder; the file is whole or as it was. Raises OSError."""
    text = json.dumps({"version": VERSION, **asdict(record)}, indent=1) + "\n"
    write_text(folder / NAME, text, guard=guard)


def text_in(folder: Path) -> str | None:
    """Return what the file holds; None: there is none that can be read."""
    try:
        return read_regular(folder / NAME, MOST_CHARACTERS).decode()
    except (OSError, UnicodeError):
        return None


def parsed(text: str, *, num_layers: int) -> PlanRecord:
    """Return the plan that a file holds.

    Raises:
        ConfigError: it is damaged, or of another version (what is wrong is said).
    """
    try:
        found: Any = parse_json(text)
        if not isinstance(found, dict) or found.pop("version", None) != VERSION:
            raise ConfigError(f"{NAME} is not of version {VERSION}")
        record = typed(PlanRecord, found)
    except WrongContent as error:
        raise ConfigError(f"{NAME}: {error}") from None
    wrong = sorted(found.keys() ^ PlanRecord.__dataclass_fields__.keys())
    if wrong:
        raise ConfigError(f"{NAME}: {wrong[0]!r:.60} is missing or unknown")
    if len(record.layers) != num_layers:
        raise ConfigError(f"{NAME}: layers has {len(record.layers)} entries; expected {num_layers}")
    for sites in record.layers:
        decided(filter(None, sites.split("+")))
    return record
