"""Point-to-point transfer of activations and their gradients between neighbouring stages."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_port.parallel.context import ParallelContext


class StageLink:
    """Sends to and receives from the stages before and after this one.

    Sends do not block; ``drain`` waits for those still under way. gloo cannot
    send a tensor that lives on a GPU, so there the transfer goes through host memory.
    """

    def __init__(self, ctx: ParallelContext) -> None:
        self.ctx = ctx
        rank, stage, stages = ctx.rank, ctx.coords.pp, ctx.topology.pp
        self.previous = ctx.topology.stage_peer(rank, stage - 1) if stage > 0 else None
        self.next = ctx.topology.stage_peer(rank, stage + 1) if stage < stages - 1 else None
        self._pending: list[tuple[dist.Work, torch.Tensor]] = []
        group = ctx.pp_group
        self._via_host = (
            group is not None and ctx.device.type != "cpu" and dist.get_backend(group) == "gloo"
        )

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Start sending; the tensor is kept alive until ``drain``."""
        payload = tensor.detach().contiguous()
        if self._via_host:
            payload = payload.cpu()
        work = dist.isend(payload, to, group=self.ctx.pp_group)
        if work is not None:
            self._pending.append((work, payload))
        if len(self._pending) > 64:
            self._pending = [(w, t) for w, t in self._pending if not w.is_completed()]

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> torch.Tensor:
        """Wait for a tensor of a known shape."""
        device = torch.device("cpu") if self._via_host else self.ctx.device
        out = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(out, source, group=self.ctx.pp_group)
        return out.to(self.ctx.device)

    def drain(self) -> None:
        """Wait until every send has been taken."""
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()
