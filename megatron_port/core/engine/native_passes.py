"""Forward and backward passes of one rank's chunks: what the native engine computes for each action of a schedule."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.data.objective import Objective
from megatron_port.core.dist.collectives import to_device_async
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.process import BACKWARD, FORWARD, ProgressTracker
from megatron_port.core.engine.loss_reduction import term_counts
from megatron_port.core.layers.linear import WeightCopies, WgradAccumulator, torch_add_rows
from megatron_port.core.layers.step import ModuleSums, StepShared, StepSlot
from megatron_port.core.optim.rules import StepValues
from megatron_port.core.optim.sharded import ShardedParameters
from megatron_port.core.pipeline.runner import Boundary, Payload, ScheduleRunner, StageLink
from megatron_port.core.pipeline.schedules import (
    Action,
    Kind,
    Schedule,
    fillers,
    forward_only,
    make_schedule,
    most_held,
)

PassKey = tuple[int, int]
"""(chunk, micro-batch)"""


def _floating(payload: Payload) -> Payload:
    """Return the tensors that have gradients."""
    return tuple(tensor for tensor in payload if tensor.is_floating_point())


def _gradients_of(inputs: Payload) -> Payload:
    """Return the gradients of a chunk's inputs, zeros for an unused one; empty where it used none."""
    found = _floating(inputs)
    if all(tensor.grad is None for tensor in found):
        return ()
    return tuple(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in found)


def reserve_swap(chunks: Sequence[Any], actions: Sequence[Action]) -> None:
    """Tell each layer's swap space how many micro-batches it holds at most (activation offload)."""
    for chunk, held in most_held(actions).items():
        for unit in chunks[chunk].units:
            parking = getattr(unit, "parking", None)
            if parking is not None and parking.swap is not None:
                parking.swap.in_flight[unit.index] = held


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Micro-batches of a step or an evaluation, and the context of their modules."""

    micro_batches: Sequence[MicroBatch]
    step: int
    shared: StepShared = field(default_factory=StepShared)
    keys: Sequence[torch.Tensor] = ()
    """Memory with the dropout keys of each micro-batch's samples, in a captured step."""

    def announce(self, number: int, slot: StepSlot) -> None:
        """Set the modules' context to a micro-batch, in a captured step without samples, which differ per replay."""
        batch, captured = self.micro_batches[number], bool(self.keys)
        slot.announce(
            self.step, () if captured else batch.sample_ids, self.shared, document_starts=batch.document_starts,
            division=batch.division, side=batch.side, keys=self.keys[number] if captured else None,
        )


class BackwardTarget:
    """Target of the gradients of backward passes. The base class leaves them in ``grad``.

    Args:
        accumulator: adds the gradients of matrices, at once or deferred.
        loss_gradient: gradient of the sum of losses, a scalar on the device: loss scale over tokens. Modules have the
            same number as ``StepShared.loss_factor``.
    """

    def __init__(self, accumulator: WgradAccumulator, loss_gradient: torch.Tensor) -> None:
        self.accumulator, self.loss_gradient = accumulator, loss_gradient

    def flush(self) -> None:
        """Add gradients that wait to the sums; called at the end of each backward pass."""

    def end_pass(self, chunk: int) -> None:
        """Note that a backward pass of a chunk has ended."""

    def sums(self) -> list[torch.Tensor]:
        """Return the gradients accumulated so far, for a probe."""
        return []


class PassWatch:
    """Hooks around the passes of a rank's chunks. The base class is a no-op."""

    def forward(self, action: Action, stage: int) -> AbstractContextManager[None]:
        """Return the context of a chunk's forward pass; ``stage``: its virtual stage."""
        return nullcontext()

    def loss(self, action: Action, loss_sum: torch.Tensor) -> None:
        """Take the sum of token losses of a micro-batch (last stage)."""

    def backward_pass(self, action: Action) -> AbstractContextManager[None]:
        """Return the context of a backward pass, or of either part of a split one (gradients of inputs; of weights)."""
        return nullcontext()

    def backward(self, action: Action, stage: int, target: BackwardTarget, gradients: Payload) -> None:
        """Take the gradients that a backward pass has added to ``target``, and those of the chunk's inputs."""


@dataclass(frozen=True)
class Stages:
    """One rank's chunks of the model, and the slot that holds the context of the micro-batch in flight."""

    chunks: Sequence[Any]
    ctx: ParallelContext
    slot: StepSlot
    progress: ProgressTracker


class PassWorker:
    """Computes the forward and backward passes of one step; a ``pipeline.runner.Worker``.

    Args:
        stages: this rank's chunks, in order; any module that follows ``engine.module.StageModule``.
        target: where gradients go.
        watch: hooks around the passes.
        filled_by: by forward pass, the weight pass that runs during its expert all-to-alls (``pipeline.schedules``).
    """

    def __init__(
        self, stages: Stages, work: StepWork, target: BackwardTarget, watch: PassWatch | None = None, *,
        filled_by: Mapping[Action, Action] = MappingProxyType({}),
    ) -> None:
        self.chunks, self.ctx, self.slot, self.progress = stages.chunks, stages.ctx, stages.slot, stages.progress
        self.work, self.target, self.watch, self.filled_by = work, target, watch or PassWatch(), filled_by
        self.total = torch.zeros((), dtype=torch.float64, device=self.ctx.device)
        """Sum of this replica's token losses (0 except where the head is)."""
        self.losses: list[torch.Tensor] = []
        """The same by micro-batch."""
        self._held: dict[PassKey, tuple[Payload | None, Payload]] = {}
        self._weights: dict[PassKey, list[Callable[[], None]]] = {}

    def run(self, action: Action, received: Payload | None) -> Payload | None:
        """Compute one pass, as :meth:`pipeline.runner.Worker.run` describes."""
        if action.kind is Kind.FORWARD:
            with self._filled(action):
                return self._forward(action, received)
        self.progress.at(BACKWARD, "micro-batch", action.micro_batch)
        with self.watch.backward_pass(action):
            if action.kind is Kind.WEIGHT:
                self.target.accumulator.flush(self._weights.pop((action.chunk, action.micro_batch)))
                return None
            return self._backward(action, received)

    def _filled(self, action: Action) -> AbstractContextManager[None]:
        """Return a context of a forward pass that computes a deferred weight pass during its expert all-to-alls."""
        weight = self.filled_by.get(action)
        if weight is None:
            return nullcontext()
        products = self._weights[weight.chunk, weight.micro_batch]
        exchanges = getattr(self.chunks[action.chunk], "row_exchanges", 0)
        if not exchanges:
            self.target.accumulator.flush(products)
        return self.target.accumulator.filling(products, exchanges)

    def _forward(self, action: Action, received: Payload | None) -> Payload:
        number, chunk = action.micro_batch, self.chunks[action.chunk]
        batch = self.work.micro_batches[number]
        self.work.announce(number, self.slot)
        self.progress.at(FORWARD, "micro-batch", number)
        stage = self._stage_of(action)
        with self.watch.forward(action, stage):
            if received is None:
                if batch.tokens is None:
                    raise ValueError("the first stage got a micro-batch without tokens")
                output: torch.Tensor = chunk(to_device_async(batch.tokens, self.ctx.device))
            else:
                for tensor in _floating(received):
                    tensor.requires_grad_(torch.is_grad_enabled())
                output = chunk(*received)
        if stage == self.ctx.topology.virtual_stages - 1:
            output = self._loss_sum(chunk, output, batch)
            self.losses.append(output.detach())
            self.total += self.losses[-1]
            self.watch.loss(action, output)
        outputs: Payload = (output,) if isinstance(output, torch.Tensor) else output
        if torch.is_grad_enabled():
            self._held[action.chunk, number] = (received, outputs)
        return outputs

    def _stage_of(self, action: Action) -> int:
        """Return the virtual stage of an action."""
        return self.ctx.topology.virtual_stage(self.ctx.coords.pp, action.chunk)

    def _loss_sum(self, chunk: Any, logits: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        if batch.labels is None:
            raise ValueError("the last stage got a micro-batch without labels")
        mask = to_device_async(batch.loss_mask, self.ctx.device) if batch.loss_mask is not None else None
        loss: torch.Tensor = chunk.loss_sum(logits, to_device_async(batch.labels, self.ctx.device), mask)
        return loss

    def _backward(self, action: Action, received: Payload | None) -> Payload | None:
        place = (action.chunk, action.micro_batch)
        inputs, outputs = self._held.pop(place)
        if action.kind is Kind.INPUT:
            self.target.accumulator.deferred = self._weights[place] = []
        try:
            if received is None:
                torch.autograd.backward(outputs, (self.target.loss_gradient.to(outputs[0].dtype),))
            else:
                torch.autograd.backward(_floating(outputs), received)
        finally:
            self.target.accumulator.deferred = None
            self.target.flush()
        gradients = () if inputs is None else _gradients_of(inputs)
        self.watch.backward(action, self._stage_of(action), self.target, gradients)
        self.target.end_pass(action.chunk)
        return gradients or None


class ForwardBackward:
    """Runs the pipeline schedule of a step's forward and backward passes; without gradients, of an evaluation.

    Args:
        target: where gradients go.
        sharded: the stages' weights and gradients.
        values: numbers of the step, set before :meth:`run`.
        sums: named sums that modules add to.
    """

    def __init__(
        self, stages: Stages, config: RunConfig, objective: Objective, target: BackwardTarget,
        sharded: ShardedParameters, values: StepValues, sums: ModuleSums,
    ) -> None:
        self.stages, self.config, self.objective, self.target = stages, config, objective, target
        self.sharded, self.values, self.sums = sharded, values, sums
        self.runner = ScheduleRunner(StageLink(stages.ctx), stages.progress)
        self.weight_copies: WeightCopies | None = stages.chunks[0].weight_copies
        self.watch = PassWatch()

    def run(
        self, micro_batches: Sequence[MicroBatch], step: int, *, keys: Sequence[torch.Tensor] = (),
        watch: PassWatch | None = None,
    ) -> PassWorker:
        """Run all passes. ``keys``: of a captured step; ``watch``: hooks in place of ``self.watch``."""
        schedule, length = self.schedule(len(micro_batches)), self.config.model.seq_length
        passes = self.worker(micro_batches, step, schedule, keys=keys, watch=watch)
        sizes = [len(b.sample_ids) for b in micro_batches]
        boundaries = {size: Boundary.of(self.stages.chunks[0].boundary(size, length)) for size in set(sizes)}
        with self.copied_weights():
            self.runner.run(schedule, passes, lambda m: boundaries[sizes[m]])
        return passes

    def worker(
        self, micro_batches: Sequence[MicroBatch], step: int, schedule: Schedule, *, keys: Sequence[torch.Tensor] = (),
        watch: PassWatch | None = None,
    ) -> PassWorker:
        """Return what computes the passes of a schedule, in :meth:`copied_weights`; arguments as of :meth:`run`."""
        plan, shared = schedule.plans[self.stages.ctx.coords.pp], self._shared(micro_batches, captured=bool(keys))
        work = StepWork(micro_batches=micro_batches, step=step, shared=shared, keys=keys)
        self.sharded.plan_gathers(self.stages.chunks, plan)
        return PassWorker(self.stages, work, self.target, watch or self.watch, filled_by=fillers(plan))

    def copied_weights(self) -> AbstractContextManager[None]:
        """Return a context that keeps cached 8-bit copies; under ZeRO stage 3 they would keep full weights."""
        copies = self.weight_copies if self.sharded.keeps_weights else None
        return nullcontext() if copies is None else copies.active()

    def schedule(self, count: int) -> Schedule:
        """Return the schedule of ``count`` micro-batches; without gradients, of an evaluation."""
        layout, topology = self.config.layout, self.stages.ctx.topology
        if not torch.is_grad_enabled():
            return forward_only(topology, count)
        schedule = make_schedule(
            layout.pipeline_schedule, topology.pp, count, layout.virtual_pipeline_size, exchanges=topology.ep > 1
        )
        reserve_swap(self.stages.chunks, schedule.plans[self.stages.ctx.coords.pp])
        return schedule

    def _shared(self, micro_batches: Sequence[MicroBatch], *, captured: bool) -> StepShared:
        values = self.values if captured else self.values.host
        shared = StepShared(
            loss_factor=values.loss_factor, sample_factor=values.sample_factor, global_tokens=values.tokens
        )
        if not torch.is_grad_enabled():
            return shared
        counts = term_counts(micro_batches, self.objective, self.stages.ctx)
        return replace(shared, term_counts=counts, auxiliary=self.sums.auxiliary, tallies=self.sums.tallies)


# Accumulation of the gradients that autograd returns (all but the linears' weights) in the engine's sums, which are
# fp32 or wider.

AddRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Adds rows to the rows of a table (``layers.linear``)."""


class GradientSink:
    """Adds to the engine's sums what autograd's hooks hand over. It holds the parameters weakly: a reference cycle
    through hooks is collected late, and with it the process groups and their threads.
    """

    def __init__(self, sharded: ShardedParameters, add_rows: AddRows = torch_add_rows) -> None:
        self._alive, self._add_rows = weakref.ref(sharded), add_rows

    def _sharded(self) -> ShardedParameters:
        sharded = self._alive()
        assert sharded is not None, "a backward pass after its engine's end"
        return sharded

    def accumulator(self) -> WgradAccumulator:
        """Return the accumulator of the gradients of matrices and tables, which bypass autograd."""
        return WgradAccumulator(self.added, self.main_grad_of, self.uninitialized_of, self._add_rows)

    def main_grad_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the sum to add a gradient to; see ``ShardedParameters.gradient_of``."""
        return self._sharded().gradient_of(parameter)

    def uninitialized_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the sum to write a first gradient over; see ``ShardedParameters.uninitialized_gradient_of``."""
        return self._sharded().uninitialized_gradient_of(parameter)

    def added(self, parameter: torch.Tensor) -> None:
        """Note that a gradient has been added to its sum."""
        sharded = self._alive()
        if sharded is not None:
            sharded.added(parameter)

    def hook(self, parameter: torch.Tensor) -> Callable[[torch.Tensor], None]:
        """Return the hook that adds what arrives as ``grad`` to a parameter's sum, and frees it."""
        return self._add

    def _add(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:  # else layers.linear adds it itself
            first = self.uninitialized_of(parameter)
            if first is None:
                self.main_grad_of(parameter).add_(parameter.grad)
            else:
                first.copy_(parameter.grad)
            parameter.grad = None
            self.added(parameter)

    def flush(self) -> None:
        """Add gradients that wait to the sums (here none do). To be called at the end of every backward pass."""


class ShardTarget(BackwardTarget):
    """Target that adds gradients to the engine's sums, whose buckets are reduced as they become complete."""

    def __init__(self, sink: GradientSink, sharded: ShardedParameters, loss_gradient: torch.Tensor) -> None:
        super().__init__(sink.accumulator(), loss_gradient)
        self.sink, self.sharded = sink, sharded

    def flush(self) -> None:
        """Add what waits in the sink to the sums."""
        self.sink.flush()

    def end_pass(self, chunk: int) -> None:
        """End a backward pass: under ZeRO stage 2 the chunk's gradients are reduced."""
        self.sharded.end_pass(chunk)

    def sums(self) -> list[torch.Tensor]:
        """Return this rank's unreduced sums."""
        return [gradient for _, gradient in self.sharded.local_gradients()]
