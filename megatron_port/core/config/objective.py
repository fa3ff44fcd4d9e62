"""Which objective a configuration asks for, and what contradicts one that a plugin registers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_port.core.config.conflicts import Conflict, Table, native_only
from megatron_port.core.registry import OBJECTIVES

if TYPE_CHECKING:
    from megatron_port.core.config.schema import RunConfig


def objective_name(config: RunConfig) -> str:
    """Return the name of a run's objective in ``registry.OBJECTIVES``."""
    if config.distillation.enabled:
        return "distillation"
    if config.training.loss in OBJECTIVES.names:
        return config.training.loss
    return "multi_token" if config.model.mtp_layers else "next_token"


def _of_a_plugin(config: RunConfig) -> list[str]:
    """Return what contradicts an objective of a plugin; the package's own have tables of their own, without torch."""
    name = config.training.loss
    if name not in OBJECTIVES.added:
        return []
    found: Any = OBJECTIVES.get(name, type)
    rows = (
        native_only("whose loss is a mean over tokens"),
        Conflict("model.mtp_layers", "only the model's own predictions have a loss", "set 0"),
        *found.conflicts,
    )
    return Table(rows, f'training.loss "{name}"').problems(config)


CONFLICTS = (Table(more=(_of_a_plugin,)),)
