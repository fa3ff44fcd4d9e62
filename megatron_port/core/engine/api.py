"""What an engine is: the one interface that the loop, checkpoints and tests know.

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
    """The update was not applied: a loss or gradient that is not finite or above its limit, or a replay."""
    loss_scale: float = 1.0
    """Scale that this step's backward used."""
    auxiliary: Mapping[str, float] = field(default_factory=dict)
    """Sums over the global batch of what the model's modules added, by name (``layers.step``)."""
    tallies: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Counts and sums of the global batch by name, in host memory (``layers.step.Tallies``)."""


@dataclass(frozen=True)
class StepLimits:
    """Limits of loss and gradient norm with which an update is applied; what is not finite never is."""

    loss: float = math.inf
    grad_norm: float = math.inf

    @property
    def largest(self) -> tuple[float, float]:
        """The limits as finite numbers, so that ``x <= limit`` alone refuses infinity and NaN."""
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
    """Looks on while a step is run once more (``health.probe``); an engine calls it around each pass."""

    def watch(self, module: torch.nn.Module) -> AbstractContextManager[None]:
        """Look at the output of every submodule in the context."""

    def forward(self, micro_batch: int, virtual: int | None = None) -> AbstractContextManager[None]:
        """Watch the forward pass of a micro-batch in the context; ``virtual``: the stage, if not the rank's own."""

    def loss(self, micro_batch: int, loss_sum: torch.Tensor) -> None:
        """Take the sum of token losses of a micro-batch (last stage)."""

    def after_backward(
        self, micro_batch: int, gradients: Sequence[torch.Tensor | None], virtual: int | None = None
    ) -> None:
        """Take the sums that parameters hold after this micro-batch, and what goes to the stage before."""

    def local_gradients(self, gradients: Sequence[tuple[ParameterRecord, torch.Tensor]]) -> None:
        """Take this rank's gradients over all micro-batches, before any sum over ranks."""


class Engine(Protocol):
    """A model, split as the layout says, that can take optimizer steps."""

    @property
    def state_check_interval(self) -> int:
        """Updates between the checks whose findings :meth:`state_damage` returns; 0: never."""

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

        Where every label of the global batch is masked, the gradient is zero and the update is applied to it: moments
        and weights decay.

        The update is not applied, and nothing but the loss scale changes, where the loss or the gradient norm is not
        finite or above ``limits`` (alike on all ranks). With ``probe`` the step is a replay: the same numbers, which
        the probe looks at, no update, and the loss scale stays. Collective.
        """

    def hash_state(self) -> None:
        """Hash the current state as the baseline of the next check, after weights were set from outside."""

    def state_damage(self, *, now: bool = False) -> Damage | None:
        """What changed in this rank's weights, masters or moments between the last two updates, though no update did
        it; None: nothing, or ``numerics.state_check_interval`` left it out. ``now``: look at what is held now instead
        (before a save; costs a pass over the state and a host synchronisation)."""

    def micro_batch_losses(self) -> Sequence[torch.Tensor]:
        """The sum of token losses of each micro-batch of the last step, in engine native also of the last evaluation
        (scalars; empty but on the last stage)."""

    def nonfinite_gradients(self) -> list[str]:
        """Parameters whose gradient, summed over replicas by the last step, is not finite; empty where it is gone."""

    def eval_step(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        """Evaluate: forward only, dropout off; sums over all replicas."""

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Let :meth:`eval_step` compute with the averaged weights where ``optimizer.ema_evaluate`` asks for them;
        before the first update with the weights. Collective."""

    def named_parameters(self) -> Iterator[tuple[ParameterRecord, torch.nn.Parameter]]:
        """This rank's parameters, tied copies included."""

    def state_pieces(self) -> Iterator[StatePiece]:
        """The training state that this rank saves. Over all ranks: every element of every kind exactly once."""

    def scalar_state(self) -> dict[str, float | int]:
        """Small state equal on all ranks: optimizer step count, loss scale and its counters."""

    def load_state(self, read: StateReader, scalars: dict[str, float | int]) -> None:
        """Set weights, moments and scalars, whatever layout or engine saved them."""

    def load_weights(self, read: StateReader) -> None:
        """Set weights only (generation, fine-tuning); moments start at zero."""
