"""Optimizer rules: the state of each parameter, and the update of a parameter and its state.

A rule is a formula and nothing else. Which rank owns which elements, the reduction of gradients, clipping, the loss
scale, skipped steps, the rounding of masters into weights and checkpoints are the engine's; they hold for every rule.

A rule says what its update needs to see. :class:`ElementwiseRule` needs one element at a time, so the engine may give
it any range of any parameter, and its result does not depend on how parameters are split over ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_port.config.schema import OptimizerConfig
from megatron_port.parallel.record import ParameterRecord
from megatron_port.parallel.state import WEIGHT
from megatron_port.registry import OPTIMIZERS


@dataclass(frozen=True)
class UpdateSettings:
    """Hyperparameters of one update of one parameter."""

    step: int
    """Number of this update, counted from 1; skipped steps do not count."""
    lr: float
    """Learning rate of this step."""
    weight_decay: float
    """0 for parameters that do not decay (biases and norms)."""
    beta1: float
    beta2: float
    eps: float


class OptimizerRule(ABC):
    """Interface of a rule. Instances hold no state of a run, so one serves all parameters."""

    @abstractmethod
    def kinds(self, record: ParameterRecord) -> tuple[str, ...]:
        """Return the names of the state tensors of a parameter, each of the parameter's shape and as wide as its
        master.

        May depend on the parameter's name, global shape and decay class, not on this rank's slice of it.
        """


class ElementwiseRule(OptimizerRule):
    """A rule that updates each element from that element's gradient and state alone."""

    @abstractmethod
    def update_(
        self, master: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], settings: UpdateSettings
    ) -> None:
        """Update ``master`` and ``state`` in place.

        Args:
            master: 1-D range of a parameter, fp32 (fp64 in an fp64 run).
            gradient: the same range of its gradient, without loss scale and after clipping; may be overwritten.
            state: one tensor for each of :meth:`kinds`, of the same range; zeros before the first update.
            settings: hyperparameters of this update.
        """


class AdamW(OptimizerRule):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101). Each engine brings its own implementations of the update."""

    KINDS = ("exp_avg", "exp_avg_sq")
    """First and second moment."""

    def kinds(self, record: ParameterRecord) -> tuple[str, ...]:
        """Return the names of both moments, for every parameter."""
        return self.KINDS


ADAMW = AdamW()


def rule_of(config: OptimizerConfig) -> OptimizerRule:
    """Return the rule that ``optimizer.name`` stands for.

    Raises:
        ConfigError: there is none of that name, or a plugin's is no OptimizerRule.
    """
    return OPTIMIZERS.get(config.name, OptimizerRule)  # type: ignore[type-abstract]  # only isinstance is asked


def state_kinds(rule: OptimizerRule, records: Iterable[ParameterRecord]) -> dict[str, tuple[str, ...]]:
    """Return, by canonical name, the kinds of tensors that a checkpoint holds of each parameter and buffer."""
    return {r.name: (WEIGHT, *rule.kinds(r)) if r.kind == WEIGHT else (r.kind,) for r in records}


def mixed_kinds(kinds: Mapping[str, Sequence[str]]) -> Mapping[str, Sequence[str]]:
    """Return ``kinds`` (by name) where two names differ in theirs, else an empty mapping: what a manifest declares."""
    return kinds if len({frozenset(each) for each in kinds.values()}) > 1 else {}
