"""Execution of a schedule on one stage: receives, passes and sends, in the order of ``schedules.turns``.

It knows neither the model nor the optimizer: a :class:`Worker` computes the passes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_port.core.dist.device_streams import COMPUTE, access, in_flight, is_observed
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.process import TRANSFER, ProgressTracker
from megatron_port.core.pipeline.schedules import Action, Kind, Message, Schedule, Span, turns

# Tensors that pass between two pipeline stages: several tensors, whose names, shapes and dtypes both ends know.
#
# A stage hands over a tuple of tensors in the boundary's order. Downstream go all of them; upstream come the
# gradients of those that have any, the floating-point ones, in the same order. A chunk of the model takes the tuple
# as its arguments.

Payload = tuple[torch.Tensor, ...]
"""The tensors of a boundary, in its order."""


@dataclass(frozen=True)
class BoundaryTensor:
    """One tensor of a boundary."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Boundary:
    """The tensors that pass from a chunk of the model to the next, for one micro-batch."""

    tensors: tuple[BoundaryTensor, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> Boundary:
        """Make a boundary from name → (shape, dtype), as a stage states them (``engine.module.StageModule``)."""
        return cls(tuple(BoundaryTensor(name, shape, dtype) for name, (shape, dtype) in tensors.items()))

    @cached_property
    def gradients(self) -> Boundary:
        """Boundary of the gradients that come back: one per floating-point tensor, with its shape and dtype."""
        return Boundary(tuple(t for t in self.tensors if t.dtype.is_floating_point))

    def empty(self, device: torch.device) -> Payload:
        """Return empty buffers to receive into."""
        return tuple(torch.empty(t.shape, dtype=t.dtype, device=device) for t in self.tensors)

    def check(self, payload: Payload) -> None:
        """Raise ValueError unless the payload has the shapes and dtypes for which the other end has made buffers."""
        found = tuple((tuple(x.shape), x.dtype) for x in payload)
        if found != tuple((t.shape, t.dtype) for t in self.tensors):
            made = ", ".join(f"{list(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in found)
            raise ValueError(
                f"a stage made {made or 'nothing'}, and the next one expects {', '.join(map(str, self.tensors))}; "
                "let boundary() of the model's stages state what their forward passes return"
            )


# Point-to-point transfer of activations between stages, and of their gradients.

class Arrival:
    """Tensors that are being received."""

    def __init__(self, works: list[dist.Work], payload: Payload, device: torch.device) -> None:
        self._works, self._payload, self._device = works, payload, device

    def take(self) -> Payload:
        """Wait for the tensors and return them. On a GPU the stream waits, not the host."""
        for work in self._works:
            work.wait()
        access(COMPUTE, "what arrived is used", reads=self._payload)
        return tuple(tensor.to(self._device) for tensor in self._payload)


class Departure:
    """Tensors that are being sent, alive until the send has ended."""

    def __init__(self, works: list[dist.Work], payload: Payload) -> None:
        self._works = works
        self._payload: Payload | None = payload

    def finish(self) -> None:
        """Wait until the send has ended and free its tensors. On a GPU the stream waits, not the host."""
        for work in self._works:
            work.wait()
        self._works, self._payload = [], None

    def free_if_done(self) -> bool:
        """Free the payload if the send has ended, without waiting. gloo reports the end only to a wait."""
        if self._payload is not None and all(work.is_completed() for work in self._works):
            self.finish()
        return self._payload is None


class StageLink:
    """Sends to and receives from other stages with the same dp and tp coordinates.

    Sends do not block. Their payloads are freed as they end: each send first frees those before it that the backend
    reports as done (NCCL: an event is queried), the caller ``finish``es those that the schedule knows to be taken
    (``pipeline.schedules``), and ``drain`` waits for the rest. gloo cannot
    send a tensor that lives on a GPU, so there the transfer goes through host memory.

    Under NCCL the tensors of a transfer are one batch: it then runs on its group's communicator, instead of one for
    each pair of ranks. Activations (``downstream``) use ``ctx.over("pp")``, gradients ``ctx.reverse_group``: two
    queues, in each of which operations run in the order in which they were started (``pipeline.schedules``).
    """

    def __init__(self, ctx: ParallelContext) -> None:
        self.ctx = ctx
        rank, stage, stages = ctx.rank, ctx.coords.pp, ctx.topology.pp
        self.previous = ctx.topology.stage_peer(rank, stage - 1) if stage > 0 else None
        self.next = ctx.topology.stage_peer(rank, stage + 1) if stage < stages - 1 else None
        self._pending: dict[bool, deque[Departure]] = {True: deque(), False: deque()}
        """Sends of each queue in the order in which they start and end."""
        self._downstream = group = ctx.over("pp")
        self._upstream = ctx.reverse_group or group
        self._batched = group is not None and dist.get_backend(group) == "nccl"
        self._via_host = group is not None and ctx.device.type != "cpu" and dist.get_backend(group) == "gloo"

    def peer(self, stage: int) -> int:
        """Return this rank's peer on another stage."""
        return self.ctx.topology.stage_peer(self.ctx.rank, stage)

    def _queue(self, downstream: bool) -> tuple[dist.ProcessGroup | None, int]:
        """The group of activations (``downstream``) or of gradients, and the tag that keeps them apart in one group.

        Tensors of one transfer have tags two apart.
        """
        if downstream:
            return self._downstream, 0
        return self._upstream, 1

    def _start(self, operation: Callable[..., dist.Work | None], payload: Payload, peer: int,
               downstream: bool) -> list[dist.Work]:
        """Start ``isend`` or ``irecv`` of each tensor."""
        group, tag = self._queue(downstream)
        if self._batched:
            works = dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer, group) for tensor in payload])
        else:
            started = [operation(x, peer, group=group, tag=tag + 2 * i) for i, x in enumerate(payload)]
            works = [work for work in started if work is not None]
        if not is_observed():
            return works
        queue, sends = f"{'activations' if downstream else 'gradients'} to or from {peer}", operation is dist.isend
        return [
            in_flight(work, "transfer between stages", reads=payload if sends else (),
                      writes=() if sends else payload, queue=queue)
            for work in works
        ]

    def send(self, tensors: Payload, to: int, *, downstream: bool = True) -> Departure:
        """Start sending; the tensors are kept alive until the send has ended."""
        capturing = self.ctx.device.type == "cuda" and torch.cuda.is_current_stream_capturing()  # nothing may be asked
        for queue in () if capturing else self._pending.values():
            while queue and queue[0].free_if_done():
                queue.popleft()
        payload = tuple(tensor.detach().contiguous() for tensor in tensors)
        if self._via_host:
            payload = tuple(tensor.cpu() for tensor in payload)
        departure = Departure(self._start(dist.isend, payload, to, downstream), payload)
        self._pending[downstream].append(departure)
        return departure

    def start_receive(self, expected: Boundary, source: int, *, downstream: bool = True) -> Arrival:
        """Start receiving the tensors of a boundary."""
        out = expected.empty(torch.device("cpu") if self._via_host else self.ctx.device)
        return Arrival(self._start(dist.irecv, out, source, downstream), out, self.ctx.device)

    def receive(self, expected: Boundary, source: int, *, downstream: bool = True) -> Payload:
        """Receive the tensors of a boundary and wait for them."""
        return self.start_receive(expected, source, downstream=downstream).take()

    def drain(self) -> None:
        """Wait until every send has ended."""
        for queue in self._pending.values():
            while queue:
                queue.popleft().finish()


class Worker(Protocol):
    """Computes the passes of one stage's chunks."""

    def run(self, action: Action, received: Payload | None) -> Payload | None:
        """Compute one pass.

        ``received``: the inputs of a FORWARD (None on the first chunk of the model), the gradients of the outputs for
        BACKWARD and INPUT (None on the last chunk); None for WEIGHT. Returns the outputs, or the gradients of the
        inputs. Gradients are those of floating-point tensors.
        """


class ScheduleRunner:
    """Runs the passes and transfers of one pipeline stage. With ``timed``, ``spans`` has the times of each pass of the
    last run."""

    def __init__(self, link: StageLink, progress: ProgressTracker) -> None:
        self.link, self.progress = link, progress
        self.stage = link.ctx.coords.pp
        self.timed = False
        self.spans: list[Span] = []

    def run(self, schedule: Schedule, worker: Worker, boundary_of: Callable[[int], Boundary]) -> None:
        """Run all passes of this stage; return when its sends have been received.

        Args:
            boundary_of: returns the boundary between stages for a micro-batch.

        Raises:
            ValueError: the tensors of a pass differ from what the boundary states.
        """
        arriving: dict[Message, Arrival] = {}
        leaving: dict[Message, Departure] = {}
        kept: dict[Action, Payload] = {}
        at, self.spans = self.progress.at, []
        for turn in turns(schedule, self.stage):
            for message in turn.post:
                arriving[message] = self.link.start_receive(
                    _expected(message, boundary_of), self.link.peer(message.source), downstream=message.downstream
                )
            received: Payload | None = None
            if turn.receive is not None:
                what = "activation of micro-batch" if turn.receive.downstream else "gradient of micro-batch"
                at(TRANSFER, what, turn.action.micro_batch)
                received = arriving.pop(turn.receive).take()
            elif turn.action.kind is not Kind.WEIGHT:
                received = kept.pop(turn.action, None)
            for message in turn.completed_sends:
                leaving.pop(message).finish()
            result = self._timed(worker, turn.action, received)
            if result is None and (turn.keep is not None or turn.send is not None):
                raise RuntimeError(f"{turn.action} gave nothing to hand on")
            if turn.keep is not None and result is not None:
                kept[turn.keep] = tuple(tensor.detach() for tensor in result)
            if turn.send is not None and result is not None:
                _expected(turn.send, boundary_of).check(result)
                leaving[turn.send] = self.link.send(
                    result, self.link.peer(turn.send.target), downstream=turn.send.downstream
                )
        at(TRANSFER, "last sends")
        self.link.drain()

    def _timed(self, worker: Worker, action: Action, received: Payload | None) -> Payload | None:
        """Run one pass; with ``timed``, note its span."""
        started = time.perf_counter() if self.timed else 0.0
        result = worker.run(action, received)
        if self.timed:
            self.spans.append(Span(action, started, time.perf_counter()))
        return result


def _expected(message: Message, boundary_of: Callable[[int], Boundary]) -> Boundary:
    """Return the boundary that a message carries: activations, or their gradients."""
    boundary = boundary_of(message.action.micro_batch)
    return boundary if message.downstream else boundary.gradients
