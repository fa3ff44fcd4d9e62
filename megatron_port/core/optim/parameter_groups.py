"""Learning rates and weight decays by parameter (``[[optimizer.groups]]``, and muP's), as fields of the records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch

from megatron_port.core.config.optimizer import INHERITED, ParameterGroup, parameter_class
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist.record import ParameterRecord, record_of
from megatron_port.core.errors import ConfigError

T = TypeVar("T")


class GroupSettings(NamedTuple):
    """Settings in which groups of parameters differ."""

    lr_factor: float
    weight_decay: float


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


def settings_in(record: ParameterRecord, weight_decay: float) -> GroupSettings:
    """Return the settings of a parameter. ``weight_decay``: of parameters that decay and are in no group."""
    if record.weight_decay is None:
        return GroupSettings(record.lr_factor, weight_decay if record.decay else 0.0)
    return GroupSettings(record.lr_factor, record.weight_decay)


def grouped(pairs: Iterable[tuple[ParameterRecord, T]], weight_decay: float) -> dict[GroupSettings, list[T]]:
    """Return what belongs to each parameter by settings, those of decaying matrices first."""
    out: dict[GroupSettings, list[T]] = {GroupSettings(1.0, weight_decay): [], GroupSettings(1.0, 0.0): []}
    for record, one in pairs:
        out.setdefault(settings_in(record, weight_decay), []).append(one)
    return {settings: found for settings, found in out.items() if found}


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
