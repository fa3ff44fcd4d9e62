"""Point-to-point transfer of activations between stages, and of their gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_port.core.dist.context import ParallelContext
from megatron_port.core.dist.device_streams import COMPUTE, access, in_flight, is_observed
from megatron_port.core.pipeline.boundary import Boundary, Payload


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
    (``pipeline.messages``), and ``drain`` waits for the rest. gloo cannot
    send a tensor that lives on a GPU, so there the transfer goes through host memory.

    Under NCCL the tensors of a transfer are one batch: it then runs on its group's communicator, instead of one for
    each pair of ranks. Activations (``downstream``) use ``ctx.over("pp")``, gradients ``ctx.reverse_group``: two
    queues, in each of which operations run in the order in which they were started (``pipeline.messages``).
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
        self._via_host = (
            group is not None and ctx.device.type != "cpu" and dist.get_backend(group) == "gloo"
        )

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
        recording = self.ctx.device.type == "cuda" and torch.cuda.is_current_stream_capturing()  # nothing may be asked
        for queue in () if recording else self._pending.values():
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
