"""Which objective a configuration asks for, and what contradicts one that a plugin registers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_port.registry import OBJECTIVES

if TYPE_CHECKING:
    from megatron_port.config.schema import RunConfig


def objective_name(config: RunConfig) -> str:
    """Return the name of a run's objective in ``registry.OBJECTIVES``."""
    if config.distillation.enabled:
        return "distillation"
    if config.training.loss in OBJECTIVES.names:
        return config.training.loss
    return "multi_token" if config.model.mtp_layers else "next_token"


def objective_problems(config: RunConfig) -> list[str]:
    """Return what contradicts an objective of a plugin; the package's own have checks of their own, without torch."""
    name, model = config.training.loss, config.model
    if name not in OBJECTIVES.added:
        return []
    found: Any = OBJECTIVES.get(name, type)
    conflicts = {
        f'engine "{config.engine}", whose loss is a mean over tokens; use engine = "native"': config.engine != "native",
        f"model.mtp_layers {model.mtp_layers}: only the model's own predictions have a loss; set 0":
            model.mtp_layers > 0,
        **found.conflicts(config),
    }
    return [f'training.loss "{name}" with {problem}' for problem, there in conflicts.items() if there]
