"""Learning rates and weight decays by parameter (``[[optimizer.groups]]``, and muP's), as fields of the records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from megatron_port.core.config.optimizer import INHERITED, ParameterGroup, parameter_class
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist.record import record_of
from megatron_port.core.errors import ConfigError


def set_parameter_groups(parameters: Iterable[torch.Tensor], config: RunConfig) -> None:
    """Write each parameter's learning-rate factor and weight decay into its record.

    muP (Tensor Programs V, arXiv 2203.03466, Adam): matrices, whose inputs grow with the width, learn at 1/m of the
    rate; their decay is m times as large, so that what a step takes from a weight stays that of the narrow model.
    """
    optimizer, width = config.optimizer, config.model.width_factor
    if not optimizer.groups and width == 1.0:
        return
    for parameter in parameters:
        record = record_of(parameter)
        group = next((g for g in optimizer.groups if g.has(record.name)), None)
        factor, decay = (group.lr_factor, group.weight_decay) if group is not None else (1.0, INHERITED)
        if decay == INHERITED:
            decay = optimizer.weight_decay if record.decay else 0.0
        if parameter_class(record.name) == "matrix":
            factor, decay = factor / width, decay * width
        parameter.record = replace(record, lr_factor=factor, weight_decay=decay)  # type: ignore[attr-defined]


def check_groups(groups: Sequence[ParameterGroup], names: Iterable[str]) -> None:
    """Raise ConfigError naming the first group that has no parameter, or none that no group before it has."""
    left = list(names)
    known = ", ".join(left[:3])
    for number, group in enumerate(groups, 1):
        rest = [name for name in left if not group.has(name)]
        if len(rest) == len(left):
            raise ConfigError(
                f"optimizer.groups, group {number}: no parameter matches {group.match!r} that no group before it has; "
                f"the model has {known}, ... (megatron-port checkpoint inspect lists them)"
            )
        left = rest
