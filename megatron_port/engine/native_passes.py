"""The passes of one rank's chunks: what the native engine computes for each action of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import torch

from megatron_port.data.batch import MicroBatch
from megatron_port.engine.probe import Probe
from megatron_port.model.site_clock import SiteClock
from megatron_port.parallel.context import ParallelContext
from megatron_port.parallel.linear import WgradAccumulator
from megatron_port.parallel.random import DropoutStream
from megatron_port.parallel.step import AuxiliarySums, Tallies
from megatron_port.parallel.to_device import to_device_async
from megatron_port.pipeline.actions import Action, Kind, most_held
from megatron_port.pipeline.boundary import Payload
from megatron_port.runtime.progress import BACKWARD, FORWARD, ProgressTracker

PassKey = tuple[int, int]
"""(chunk, micro-batch)"""


def _floating(payload: Payload) -> Payload:
    """The tensors that have gradients."""
    return tuple(tensor for tensor in payload if tensor.is_floating_point())


def _gradients_of(inputs: Payload) -> Payload:
    """The gradients of a chunk's inputs, zero for one that it did not use; empty: it used none."""
    found = _floating(inputs)
    if all(tensor.grad is None for tensor in found):
        return ()
    return tuple(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in found)


def unit_uses(chunks: Sequence[Any], actions: Sequence[Action]) -> list[torch.nn.Module]:
    """Return the units whose weights the actions of a stage read, in order.

    Deferred weight products read inputs and output gradients, no weights; nor do backward passes of units with
    ``backward_reads_weights = False``. Units with ``training_only`` are not used while they are in evaluation mode.
    """
    units = [[u for u in c.units if u.training or not getattr(u, "training_only", False)] for c in chunks]
    backward = [[u for u in reversed(mine) if getattr(u, "backward_reads_weights", True)] for mine in units]
    out: list[torch.nn.Module] = []
    for action in actions:
        if action.kind is Kind.FORWARD:
            out += units[action.chunk]
        elif action.kind is not Kind.WEIGHT:
            out += backward[action.chunk]
    return out


def reserve_swap(chunks: Sequence[Any], actions: Sequence[Action]) -> None:
    """Tell each layer's swap space how many of a step's micro-batches wait in it at most."""
    for chunk, held in most_held(actions).items():
        for unit in chunks[chunk].units:
            parking = getattr(unit, "parking", None)
            if parking is not None and parking.swap is not None:
                parking.swap.in_flight[unit.index] = held


def _clock_of(chunk: Any) -> SiteClock | None:
    """Return who measures a chunk's activations; None: nobody."""
    parking = getattr(chunk, "parking", None)
    return None if parking is None else parking.clock


class Passes:
    """Forward and backward passes of one step; a ``pipeline.runner.Worker``.

    Args:
        chunks: this rank's, in order; any module that follows ``engine.module.StageModule``.
        loss_gradient: what the loss of the step is multiplied by for its gradient, a scalar on the device: loss scale
            over tokens. The modules are told the number, ``loss_factor``.
        global_tokens: loss tokens of the step, for the modules; ``term_counts``: of the objective's further
            terms.
        keys: of a recorded step: memory with the dropout keys of each micro-batch's samples.
        auxiliary, tallies: what the modules add to; None: nobody reads it.
        sample_factor: as ``loss_factor``, of terms that are means over samples.
        probe: looks on, in a replay; ``sums`` gives it the gradients summed so far.
        after_backward: told the chunk whose backward pass has ended.
        flush_gradients: adds what autograd returned in a backward pass to the sums.
        filled_by: by forward pass, the weight pass that fills its exchanges of rows (``pipeline.filling``).
    """

    def __init__(
        self, chunks: Sequence[Any], ctx: ParallelContext, stream: DropoutStream, progress: ProgressTracker,
        gradients: WgradAccumulator, *, micro_batches: Sequence[MicroBatch], step: int,
        loss_factor: float | torch.Tensor, loss_gradient: torch.Tensor, global_tokens: float | torch.Tensor = 1.0,
        term_counts: tuple[float, ...] = (), keys: Sequence[torch.Tensor] = (), auxiliary: AuxiliarySums | None = None,
        tallies: Tallies | None = None, sample_factor: float | torch.Tensor = 1.0, probe: Probe | None = None,
        sums: Callable[[], list[torch.Tensor]] = list,
        after_backward: Callable[[int], None] = lambda chunk: None, flush_gradients: Callable[[], None] = lambda: None,
        filled_by: Mapping[Action, Action] = MappingProxyType({}),
    ) -> None:
        self.chunks, self.ctx, self.stream, self.progress, self.gradients = chunks, ctx, stream, progress, gradients
        self.micro_batches, self.step, self.loss_factor, self.keys = micro_batches, step, loss_factor, keys
        self.loss_gradient, self.global_tokens, self.auxiliary = loss_gradient, global_tokens, auxiliary
        self.tallies, self.sample_factor, self.term_counts = tallies, sample_factor, term_counts
        self.probe, self.sums, self.after_backward = probe, sums, after_backward
        self.flush_gradients, self.filled_by = flush_gradients, filled_by
        self.total = torch.zeros((), dtype=torch.float64, device=ctx.device)
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
        if action.kind is Kind.WEIGHT:
            self.gradients.flush(self._weights.pop((action.chunk, action.micro_batch)))
            return None
        return self._backward(action, received)

    def _filled(self, action: Action) -> AbstractContextManager[None]:
        """Compute weight products of the pass that fills a forward pass while that exchanges rows of experts; where it
        exchanges none, before it."""
        weight = self.filled_by.get(action)
        if weight is None:
            return nullcontext()
        products = self._weights[weight.chunk, weight.micro_batch]
        exchanges = getattr(self.chunks[action.chunk], "row_exchanges", 0)
        if not exchanges:
            self.gradients.flush(products)
        return self.gradients.filling(products, exchanges)

    def _forward(self, action: Action, received: Payload | None) -> Payload:
        number, chunk = action.micro_batch, self.chunks[action.chunk]
        batch = self.micro_batches[number]
        self._announce(number)
        self.progress.at(FORWARD, "micro-batch", number)
        clock = _clock_of(chunk)
        probe, virtual = self.probe, self.ctx.topology.virtual_stage(self.ctx.coords.pp, action.chunk)
        with nullcontext() if probe is None else probe.forward(number, virtual), \
                nullcontext() if clock is None else clock.timed(f"forward {action.chunk}"):
            if received is None:
                if batch.tokens is None:
                    raise ValueError("the first stage got a micro-batch without tokens")
                output: torch.Tensor = chunk(to_device_async(batch.tokens, self.ctx.device))
            else:
                for tensor in _floating(received):
                    tensor.requires_grad_(torch.is_grad_enabled())
                output = chunk(*received)
        if virtual == self.ctx.topology.virtual_stages - 1:
            output = self._loss_sum(chunk, output, batch)
            self.losses.append(output.detach())
            self.total += self.losses[-1]
            if probe is not None:
                probe.loss(number, output)
        outputs: Payload = (output,) if isinstance(output, torch.Tensor) else output
        if torch.is_grad_enabled():
            self._held[action.chunk, number] = (received, outputs)
        return outputs

    def _announce(self, number: int) -> None:
        """Tell the modules which micro-batch comes; in a recorded step not its samples, which differ in each replay."""
        batch, recorded = self.micro_batches[number], bool(self.keys)
        self.stream.set_micro_batch(
            self.step, () if recorded else batch.sample_ids, loss_factor=self.loss_factor,
            global_tokens=self.global_tokens, term_counts=self.term_counts, document_starts=batch.document_starts,
            division=batch.division, side=batch.side, auxiliary=self.auxiliary, tallies=self.tallies,
            sample_factor=self.sample_factor,
            keys=self.keys[number] if recorded else None,
        )

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
            self.gradients.deferred = self._weights[place] = []
        try:
            if received is None:
                torch.autograd.backward(outputs, (self.loss_gradient.to(outputs[0].dtype),))
            else:
                torch.autograd.backward(_floating(outputs), received)
        finally:
            self.gradients.deferred = None
            self.flush_gradients()
        gradients = () if inputs is None else _gradients_of(inputs)
        if self.probe is not None:
            virtual = self.ctx.topology.virtual_stage(self.ctx.coords.pp, action.chunk)
            self.probe.after_backward(action.micro_batch, [*self.sums(), *gradients], virtual)
        self.after_backward(action.chunk)
        return gradients or None
