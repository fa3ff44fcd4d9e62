"""Interface of an engine, the only one that the loop, checkpoints and tests use.

Nothing above ``engine/`` knows which engine runs, and no engine knows the model
beyond its list of layers and their parameter records.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.record import ParameterRecord, StatePiece, StateReader
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.step import StepSlot
from megatron_port.core.optim.state_watch import Damage


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step; the same values on every rank."""

    loss: float
    """Mean over all loss tokens of the global batch, before the update (nats); 0 where ``tokens`` is 0."""
    tokens: int
    """Loss tokens of the global batch; pairs, where the loss is of pairs."""
    grad_norm: float | None
    """Global L2 norm before clipping, loss scale and batch weighting removed; None if it is not finite."""
    skipped: bool = False
    """The update was skipped: loss or gradient norm not finite or above its limit, or a replay."""
    loss_scale: float = 1.0
    """Scale that this step's backward used."""
    auxiliary: Mapping[str, float] = field(default_factory=dict)
    """Sums over the global batch of what the model's modules added, by name (``layers.step``)."""
    tallies: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Counts and sums of the global batch by name, in host memory (``layers.step.Tallies``)."""


@dataclass(frozen=True)
class StepLimits:
    """Limits of loss and gradient norm, above which an update is skipped; it always is where one is not finite."""

    loss: float = math.inf
    grad_norm: float = math.inf

    @property
    def largest(self) -> tuple[float, float]:
        """The limits as finite numbers, so that ``x <= limit`` is false for infinity and NaN."""
        return min(self.loss, sys.float_info.max), min(self.grad_norm, sys.float_info.max)


NO_LIMITS = StepLimits()


@dataclass(frozen=True)
class EvalResult:
    """Sums over a set of micro-batches of all replicas; the same on every rank."""

    loss_sum: float
    tokens: int

    @property
    def loss(self) -> float:
        """Mean loss (nats per token); NaN where no token counts."""
        return self.loss_sum / self.tokens if self.tokens else math.nan


class StepProbe(Protocol):
    """Observer of a step that is run once more (``health.probe``); an engine calls it around each pass."""

    def watch(self, module: torch.nn.Module) -> AbstractContextManager[None]:
        """Return a context in which the output of every submodule is looked at."""

    def forward(self, micro_batch: int, virtual: int | None = None) -> AbstractContextManager[None]:
        """Watch the forward pass of a micro-batch in the context; ``virtual``: the stage, if not the rank's own."""

    def loss(self, micro_batch: int, loss_sum: torch.Tensor) -> None:
        """Take the sum of token losses of a micro-batch (last stage)."""

    def after_backward(
        self, micro_batch: int, gradients: Sequence[torch.Tensor | None], virtual: int | None = None
    ) -> None:
        """Take the gradients accumulated up to this micro-batch, and those of the stage's inputs."""

    def local_gradients(self, gradients: Sequence[tuple[ParameterRecord, torch.Tensor]]) -> None:
        """Take this rank's gradients over all micro-batches, before they are reduced."""


class Engine(Protocol):
    """One rank's part of a model, with the optimizer, that takes steps together with the other ranks."""

    @property
    def state_check_interval(self) -> int:
        """Updates between checks of the state (:meth:`state_damage`); 0: never."""

    @property
    def buffers(self) -> Sequence[tuple[ParameterRecord, torch.Tensor]]:
        """This rank's state that no gradient changes (``dist.collectives``)."""
    stream: DropoutStream
    """Masks of dropout."""
    step_slot: StepSlot
    """Where the modules find the micro-batch in flight."""

    def train_step(
        self, micro_batches: Sequence[MicroBatch], *, step: int, lr: float, limits: StepLimits = NO_LIMITS,
        probe: StepProbe | None = None,
    ) -> StepResult:
        """Take one optimizer step over this replica's micro-batches. ``step`` keys dropout.

        Where every label of the global batch is masked, gradients are zero and the update is applied: moments and
        weights decay.

        The update is skipped, and nothing but the loss scale changes, where the loss or the gradient norm is not finite
        or above ``limits`` (alike on all ranks). With ``probe`` the step is a replay: the same numbers, shown to the
        probe, no update, and an unchanged loss scale. Collective.
        """

    def hash_state(self) -> None:
        """Hash the current state, for the next check to compare with, after weights were set from outside."""

    def state_damage(self, *, now: bool = False) -> Damage | None:
        """Return the damage to this rank's weights, masters or moments between the last two updates (changes that no
        update made); None: none, or not checked (``numerics.state_check_interval``). ``now``: check the current state
        instead, as before a save, which costs a pass over the state and a host synchronisation."""

    def micro_batch_losses(self) -> Sequence[torch.Tensor]:
        """Return the sum of token losses of each micro-batch of the last step, in engine native also of the last
        evaluation: scalars; empty on all stages but the last."""

    def nonfinite_gradients(self) -> list[str]:
        """Return the names of parameters whose reduced gradient in the last step is not finite; empty where gradients
        are no longer there."""

    def eval_step(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        """Evaluate: forward only, dropout off; sums over all replicas."""

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Let :meth:`eval_step` compute with the averaged weights where ``optimizer.ema_evaluate`` asks for them;
        before the first update with the weights. Collective."""

    def named_parameters(self) -> Iterator[tuple[ParameterRecord, torch.nn.Parameter]]:
        """Yield this rank's parameters, tied copies included."""

    def state_pieces(self) -> Iterator[StatePiece]:
        """Yield the training state that this rank saves. Over all ranks: every element of every kind exactly once."""

    def scalar_state(self) -> dict[str, float | int]:
        """Return small state, equal on all ranks: optimizer step count, loss scale and its counters."""

    def load_state(self, read: StateReader, scalars: dict[str, float | int]) -> None:
        """Set weights, moments and scalars, whatever layout or engine saved them."""

    def load_weights(self, read: StateReader) -> None:
        """Set weights only (generation, fine-tuning); moments start at zero."""
