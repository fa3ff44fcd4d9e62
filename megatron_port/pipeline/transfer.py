"""Point-to-point transfer of activations and their gradients between neighbouring stages."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_port.parallel.context import ParallelContext


class StageLink:
    """Sends to and receives from the stages before and after this one.

    Sends do not block; ``drain`` waits for those still under way. gloo cannot
    send a tensor that lives on a GPU, so there the transfer goes through host memory.

    Under NCCL every transfer is a batch of one: it then runs on its group's communicator, instead of one for
    each pair of ranks. Activations use ``ctx.pp_group``, gradients ``ctx.pp_reverse_group``: each is a chain
    in one direction, so no queue can wait for itself (see ``parallel.context``).
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

    def _direction(self, downstream: bool) -> dist.ProcessGroup | None:
        """The group of activations (``downstream``) or of gradients."""
        return self.ctx.pp_group if downstream else self.ctx.pp_reverse_group or self.ctx.pp_group

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Start sending; the tensor is kept alive until ``drain``."""
        payload = tensor.detach().contiguous()
        if self._via_host:
            payload = payload.cpu()
        group = self._direction(to == self.next)
        if self._batched:
            works = dist.batch_isend_irecv([dist.P2POp(dist.isend, payload, to, group)])
        else:
            work = dist.isend(payload, to, group=group)
            works = [] if work is None else [work]
        self._pending += [(work, payload) for work in works]
        if len(self._pending) > 64:
            self._pending = [(w, t) for w, t in self._pending if not w.is_completed()]

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> torch.Tensor:
        """Wait for a tensor of a known shape."""
        device = torch.device("cpu") if self._via_host else self.ctx.device
        out = torch.empty(shape, dtype=dtype, device=device)
        group = self._direction(source == self.previous)
        if self._batched:
            for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, out, source, group)]):
                work.wait()
        else:
            dist.recv(out, source, group=group)
        return out.to(self.ctx.device)

    def drain(self) -> None:
        """Wait until every send has been taken."""
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()
