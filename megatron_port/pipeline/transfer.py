"""Point-to-point transfer of activations and their gradients between stages."""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist

from megatron_port.parallel.context import ParallelContext


class Arrival:
    """A tensor that is being received."""

    def __init__(self, works: list[dist.Work], tensor: torch.Tensor, device: torch.device) -> None:
        self._works, self._tensor, self._device = works, tensor, device

    def take(self) -> torch.Tensor:
        """The tensor, once it is there (a GPU's stream waits, not the host)."""
        for work in self._works:
            work.wait()
        return self._tensor.to(self._device)


class Departure:
    """A tensor that is being sent, alive until the send has ended."""

    def __init__(self, works: list[dist.Work], payload: torch.Tensor) -> None:
        self._works = works
        self._payload: torch.Tensor | None = payload

    def finish(self) -> None:
        """Wait for the receiver to have it (a GPU's stream waits, not the host) and free it."""
        for work in self._works:
            work.wait()
        self._works, self._payload = [], None

    def free_if_done(self) -> bool:
        """Free the payload if the send has ended, without waiting. gloo's work says that it has only after a wait."""
        if self._payload is not None and all(work.is_completed() for work in self._works):
            self.finish()
        return self._payload is None


class StageLink:
    """Sends to and receives from other stages with the same dp and tp coordinates.

    Sends do not block. Their payloads are freed as they end: each send first frees those before it that the backend
    reports as done (NCCL: an event is queried), the caller ``finish``es those that the schedule knows to be taken
    (``pipeline.messages``), and ``drain`` waits for the rest. gloo cannot
    send a tensor that lives on a GPU, so there the transfer goes through host memory.

    Under NCCL every transfer is a batch of one: it then runs on its group's communicator, instead of one for
    each pair of ranks. Activations (``downstream``) use ``ctx.pp_group``, gradients ``ctx.pp_reverse_group``: two
    queues, in each of which operations run in the order in which they were started (``pipeline.messages``).
    """

    def __init__(self, ctx: ParallelContext) -> None:
        self.ctx = ctx
        rank, stage, stages = ctx.rank, ctx.coords.pp, ctx.topology.pp
        self.previous = ctx.topology.stage_peer(rank, stage - 1) if stage > 0 else None
        self.next = ctx.topology.stage_peer(rank, stage + 1) if stage < stages - 1 else None
        self._pending: dict[bool, deque[Departure]] = {True: deque(), False: deque()}
        """Departures of each queue, in the order in which they were started and end."""
        group = ctx.pp_group
        self._batched = group is not None and dist.get_backend(group) == "nccl"
        self._via_host = (
            group is not None and ctx.device.type != "cpu" and dist.get_backend(group) == "gloo"
        )

    def peer(self, stage: int) -> int:
        """The rank of another stage."""
        return self.ctx.topology.stage_peer(self.ctx.rank, stage)

    def _queue(self, downstream: bool) -> tuple[dist.ProcessGroup | None, int]:
        """The group of activations (``downstream``) or of gradients, and the tag that keeps them apart in one group."""
        if downstream:
            return self.ctx.pp_group, 0
        return self.ctx.pp_reverse_group or self.ctx.pp_group, 1

    def send(self, tensor: torch.Tensor, to: int, *, downstream: bool = True) -> Departure:
        """Start sending; the tensor is kept alive until the send has ended."""
        for queue in self._pending.values():
            while queue and queue[0].free_if_done():
                queue.popleft()
        payload = tensor.detach().contiguous()
        if self._via_host:
            payload = payload.cpu()
        group, tag = self._queue(downstream)
        if self._batched:
            works = dist.batch_isend_irecv([dist.P2POp(dist.isend, payload, to, group)])
        else:
            work = dist.isend(payload, to, group=group, tag=tag)
            works = [] if work is None else [work]
        departure = Departure(works, payload)
        self._pending[downstream].append(departure)
        return departure

    def start_receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, source: int, *, downstream: bool = True
    ) -> Arrival:
        """Start receiving a tensor of a known shape."""
        device = torch.device("cpu") if self._via_host else self.ctx.device
        out = torch.empty(shape, dtype=dtype, device=device)
        group, tag = self._queue(downstream)
        if self._batched:
            works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, out, source, group)])
        else:
            work = dist.irecv(out, source, group=group, tag=tag)
            works = [] if work is None else [work]
        return Arrival(works, out, self.ctx.device)

    def receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, source: int, *, downstream: bool = True
    ) -> torch.Tensor:
        """Wait for a tensor of a known shape."""
        return self.start_receive(shape, dtype, source, downstream=downstream).take()

    def drain(self) -> None:
        """Wait until every send has been taken."""
        for queue in self._pending.values():
            while queue:
                queue.popleft().finish()
