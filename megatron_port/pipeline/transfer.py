"""Point-to-point transfer of activations and their gradients between stages."""

from __future__ import annotations

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


class StageLink:
    """Sends to and receives from other stages with the same dp and tp coordinates.

    Sends do not block; ``drain`` waits for those still under way. gloo cannot
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
        self._pending: list[tuple[dist.Work, torch.Tensor]] = []
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

    def send(self, tensor: torch.Tensor, to: int, *, downstream: bool = True) -> None:
        """Start sending; the tensor is kept alive until ``drain``."""
        payload = tensor.detach().contiguous()
        if self._via_host:
            payload = payload.cpu()
        group, tag = self._queue(downstream)
        if self._batched:
            works = dist.batch_isend_irecv([dist.P2POp(dist.isend, payload, to, group)])
        else:
            work = dist.isend(payload, to, group=group, tag=tag)
            works = [] if work is None else [work]
        self._pending += [(work, payload) for work in works]
        if len(self._pending) > 64:
            self._pending = [(w, t) for w, t in self._pending if not w.is_completed()]

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
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()
