"""An optimizer step of the native engine as a list of parts, which run one after the other on a :class:`StepState`.

A plain step (``StepParts.plain``): count, passes, reduce, show, loss, norm, verify, update, hash, gather. ZeRO
stages 0 to 3 differ in what their ``ShardedParameters`` do at reduce and gather, rules and offload in the update that
is applied. A captured step (``kernels.step_graphs``) runs the same parts within two of its own, in CUDA graphs.

No part keeps the engine: a cycle of references would keep process groups alive until a garbage collection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import REPLICAS
from megatron_port.core.dist.process import OPTIMIZER, REDUCE, ProgressTracker
from megatron_port.core.dist.record import ParameterRecord
from megatron_port.core.engine.api import NO_LIMITS, StepLimits
from megatron_port.core.engine.loss_reduction import (
    device_sums,
    global_count,
    global_samples,
    loss_weight,
    reduced_auxiliary,
    skip_for_loss,
)
from megatron_port.core.engine.native_passes import ForwardBackward
from megatron_port.core.engine.native_update import Update
from megatron_port.core.layers.step import ModuleSums
from megatron_port.core.optim.gradients import LossScaler, NormStatistics, global_square_norm, owned_gradients
from megatron_port.core.optim.rules import StepNumbers, StepValues
from megatron_port.core.optim.sharded import ShardedParameters
from megatron_port.core.optim.state_watch import StateWatch

GradientHook = Callable[[list[tuple[ParameterRecord, torch.Tensor]]], None]


class StepOutcome(NamedTuple):
    """Numbers of a step that the host reads at its end, all in one copy."""

    loss_sum: float
    """Sum of the losses of the global batch."""
    counted: float
    """Denominator of their mean."""
    norm: float
    """Gradient norm, without loss scale and before clipping."""
    skipped: float
    """Not 0: the update was skipped."""
    differing: float
    """Rows of the state that something other than an update changed."""


def pack_outcome(auxiliary: torch.Tensor, **numbers: torch.Tensor) -> torch.Tensor:
    """Return the numbers of :class:`StepOutcome`, by name, and ``auxiliary`` as one float64 tensor on the device."""
    return torch.stack([*(numbers[name].double() for name in StepOutcome._fields), *auxiliary])


@dataclass
class StepState:
    """Inputs of a step, and results that its parts hand on to later ones."""

    micro_batches: Sequence[MicroBatch]
    step: int
    lr: float = 0.0
    limits: StepLimits = NO_LIMITS
    keys: Sequence[torch.Tensor] = ()
    """Memory with the dropout keys of each micro-batch's samples, in a captured step."""
    losses: list[torch.Tensor] = field(default_factory=list)
    """Sum of token losses of each micro-batch; empty but on the last stage."""
    total: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    """Sum of this replica's losses, on the device."""
    sums: torch.Tensor = field(default_factory=lambda: torch.zeros(2))
    """Loss and count of the global batch, float64 [2], on the device as the tensors below."""
    auxiliary: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    """Modules' named sums, float64 [names]."""
    skip: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    """Not zero: the update is to be skipped, whatever the norm (float32 scalar)."""
    square: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    """Squared norm of all gradients, with the loss scale (float64 scalar)."""
    totals: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tallies over all ranks."""
    outcome: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    """:class:`StepOutcome` and ``auxiliary``, float64."""

    def read_outcome(self) -> tuple[StepOutcome, list[float]]:
        """Return the outcome and the auxiliary sums: the step's host synchronisation."""
        values, size = self.outcome.tolist(), len(StepOutcome._fields)
        return StepOutcome(*values[:size]), values[size:]


class StepPart(Protocol):
    """One part of a step."""

    def run(self, state: StepState) -> None:
        """Run the part, which reads and sets ``state``."""


def run_parts(parts: Sequence[StepPart], state: StepState) -> None:
    """Run parts in order."""
    for part in parts:
        part.run(state)


class Masks(StepPart, Protocol):
    """Clears the gradients of pruned weights, between their reduction and the norm (``weights.masks``)."""

    def loaded(self) -> None:
        """Find the pruned weights (zeros), after weights have been loaded."""

    def apply_to(self, bucket: Any) -> None:
        """Clear the gradients of a bucket whose sums are final, before they go to the host."""


class Average(Protocol):
    """Exponential moving average of the weights (``weights.masks.WeightAverage``)."""

    def restore(self, steps: int) -> None:
        """Continue after ``steps`` updates, when the state has been loaded."""

    def update(self, skipped: torch.Tensor) -> None:
        """Take in the masters after a step, unless ``skipped`` (scalar on the device) is not 0."""

    def as_weights(self) -> AbstractContextManager[None]:
        """Let the model compute with the average. Collective."""


class Count:
    """Counts the step's loss tokens, and sets the numbers that kernels read (:class:`StepValues`)."""

    def __init__(
        self, runner: ForwardBackward, ctx: ParallelContext, seq_length: int, values: StepValues, scaler: LossScaler,
        norms: NormStatistics, progress: ProgressTracker,
    ) -> None:
        self.runner, self.ctx, self.seq_length, self.values = runner, ctx, seq_length, values
        self.scaler, self.norms, self.progress = scaler, norms, progress

    def run(self, state: StepState) -> None:
        """Run the part."""
        self.progress.at(REDUCE, "tokens of the step")
        tokens = global_count(state.micro_batches, self.runner.objective, self.ctx, seq_length=self.seq_length)
        scale, (largest_loss, largest_norm), (mean, deviation) = self.scaler.scale, state.limits.largest, self.norms.now
        self.values.set(StepNumbers(
            lr=state.lr, loss_factor=scale * loss_weight(tokens), tokens=tokens,
            sample_factor=scale / global_samples(state.micro_batches, self.ctx),
            replica_tokens=tokens / self.ctx.size(*REPLICAS), scale=scale, largest_loss=largest_loss,
            largest_norm=largest_norm, norm_mean=mean, norm_deviation=deviation,
        ))


class RunPasses:
    """Runs the forward and backward passes; buckets of gradients are reduced meanwhile."""

    def __init__(
        self, runner: ForwardBackward, sharded: ShardedParameters, sums: ModuleSums, stage: torch.nn.Module
    ) -> None:
        self.runner, self.sharded, self.sums, self.stage = runner, sharded, sums, stage

    def run(self, state: StepState) -> None:
        """Run the part."""
        self.sharded.begin(len(state.micro_batches), early=True)
        self.sums.reset()
        passes = self.runner.run(state.micro_batches, state.step, keys=state.keys)
        state.losses, state.total = passes.losses, passes.total


class Reduce:
    """Finishes the reduction of gradients over replicas, and reduces partial and tied ones."""

    def __init__(self, sharded: ShardedParameters, progress: ProgressTracker) -> None:
        self.sharded, self.progress = sharded, progress

    def run(self, state: StepState) -> None:
        """Run the part."""
        self.progress.at(REDUCE, "gradients over the replicas, partial and tied ones over tp and the stages")
        self.sharded.finish()


class Show:
    """Calls ``hook``, if there is one, with every final gradient; costs a gather of all of them."""

    def __init__(self, sharded: ShardedParameters, scaler: LossScaler) -> None:
        self.sharded, self.scaler = sharded, scaler
        self.hook: GradientHook | None = None

    def run(self, state: StepState) -> None:
        """Run the part."""
        if self.hook is not None:
            scale = self.scaler.scale
            self.hook([(record, g / scale) for record, g in self.sharded.whole_gradients()])


class SumLoss:
    """Reduces the loss and the modules' named sums over all ranks; sets ``skip`` where the loss is above its limit."""

    def __init__(self, ctx: ParallelContext, values: StepValues, sums: ModuleSums, progress: ProgressTracker) -> None:
        self.ctx, self.values, self.sums, self.progress = ctx, values, sums, progress

    def run(self, state: StepState) -> None:
        """Run the part."""
        self.progress.at(REDUCE, "loss of the step")
        state.sums = sums = device_sums([state.total, self.values.replica_tokens], self.ctx)
        state.auxiliary = reduced_auxiliary(self.sums.auxiliary, self.ctx)
        state.skip = skip_for_loss(sums, self.values.largest_loss)


class GradNorm:
    """Computes the squared norm of all gradients, over all ranks."""

    def __init__(
        self, sharded: ShardedParameters, ctx: ParallelContext, update: Update, progress: ProgressTracker
    ) -> None:
        self.ctx, self.square_norm, self.progress = ctx, update.square_norm, progress
        self.owned = owned_gradients(((p.record, p.gradient) for p in sharded.pieces), ctx, zero_dims=sharded.zero_dims)

    def run(self, state: StepState) -> None:
        """Run the part."""
        self.progress.at(OPTIMIZER, "gradient norm and update")
        state.square = global_square_norm(self.owned, self.ctx, self.square_norm)


class VerifyState:
    """Compares the state with its hashes after the last update, before this one changes it."""

    def __init__(self, watch: StateWatch) -> None:
        self.watch = watch

    def run(self, state: StepState) -> None:
        """Run the part."""
        self.watch.verify_state()


class ApplyUpdate:
    """Updates masters and weights, their moving average, and modules' buffers by their tallies."""

    def __init__(
        self, update: Update, values: StepValues, average: Average | None, chunks: Sequence[Any],
        sums: ModuleSums, sharded: ShardedParameters,
    ) -> None:
        self.update, self.values, self.average, self.chunks, self.sums = update, values, average, chunks, sums
        self.watch, self.world = sharded.watch, sharded.ctx.world_group

    def run(self, state: StepState) -> None:
        """Run the part."""
        self.watch.verify_gradients()
        norm, skipped = self.update.step(state.square, self.values, skip=state.skip)
        if self.average is not None:
            self.average.update(skipped)
        state.totals = self.sums.tallies.totals(self.world) if self.sums.tallies.specs else {}
        for chunk in self.chunks if state.totals else ():
            chunk.after_update(state.totals, skipped)
        loss_sum, counted = state.sums
        state.outcome = pack_outcome(
            state.auxiliary, loss_sum=loss_sum, counted=counted, norm=norm, skipped=skipped,
            differing=self.watch.differing,
        )


class HashState:
    """Hashes the state after an update, for the next :class:`VerifyState`: a part of captured steps, which gather
    weights at their beginning. A plain step has :class:`HashAndGather`."""

    def __init__(self, watch: StateWatch) -> None:
        self.watch = watch

    def run(self, state: StepState) -> None:
        """Run the part."""
        self.watch.hash_state()


class HashAndGather:
    """Hashes the state and starts gathering the updated weights, which overlaps the next step's first passes."""

    def __init__(self, sharded: ShardedParameters) -> None:
        self.sharded = sharded

    def run(self, state: StepState) -> None:
        """Run the part."""
        self.sharded.watch.hash_state(gathering=self.sharded.gathers_after_update)
        self.sharded.start_gather()


@dataclass(frozen=True)
class StepParts:
    """The parts of an engine's step."""

    count: StepPart
    gradients: Sequence[StepPart]
    """From the passes to the gradient norm."""
    verify: StepPart
    apply: StepPart
    hash_state: StepPart

    def plain(self, sharded: ShardedParameters) -> list[StepPart]:
        """Return the parts of a step, in order."""
        return [self.count, *self.gradients, self.verify, self.apply, HashAndGather(sharded)]


class CapturedParts(Protocol):
    """Parts of steps that are captured once and replayed (``kernels.step_graphs.CapturedSteps``)."""

    graphs: Any
    """The CUDA graphs."""

    def parts(self, plain: StepParts, *, replayed: bool) -> list[StepPart]:
        """Return the parts of a step, in order. ``plain``: of a step that is not captured; ``replayed``: this one may
        be captured and replayed."""
