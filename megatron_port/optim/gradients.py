"""What is done with gradients between the last backward pass and the update, driven by the parameter records.

Both engines use these, so a layout's gradient rules exist once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from megatron_port.parallel.context import ParallelContext
from megatron_port.parallel.record import ParameterRecord

RecordedGrad = tuple[ParameterRecord, torch.Tensor]


def _all_reduce_flat(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sum a list of small tensors in place with one collective a dtype."""
    for dtype in sorted({t.dtype for t in tensors}, key=str):
        same = [t for t in tensors if t.dtype == dtype]
        flat = torch.cat([t.reshape(-1) for t in same])
        dist.all_reduce(flat, group=group)
        at = 0
        for t in same:
            t.copy_(flat[at : at + t.numel()].view_as(t))
            at += t.numel()


def reduce_partial_gradients(grads: Iterable[RecordedGrad], ctx: ParallelContext) -> None:
    """Sum over tp the gradients of which each tensor-parallel rank holds only its tokens' part, and over the copies of
    key/value heads those of which each holds only its query heads' part. In place."""
    grads = list(grads)
    partial = [g for record, g in grads if record.partial_grad_over_tp]
    if partial and ctx.tp_group is not None:
        _all_reduce_flat(partial, ctx.tp_group)
    shared = [g for record, g in grads if record.tp_copies > 1]
    if shared and ctx.kv_group is not None:
        _all_reduce_flat(shared, ctx.kv_group)


def reduce_tied_gradients_first(grads: Iterable[RecordedGrad], ctx: ParallelContext) -> None:
    """Sum gradients of tied parameters over the stages that hold a copy, for an engine that sums over replicas later.

    The two stages' replica groups may add in different orders (their buffers differ), and copies whose gradients differ
    in the last bit drift apart. So the gradients of tied parameters are summed onto the first replica, there over the
    stages, and are zero on the other replicas, so that the later sum adds zeros to them. In place.
    """
    tied = [g for record, g in grads if record.tied_key is not None]
    if not tied or ctx.embedding_group is None:
        return
    if ctx.dp_group is not None:
        for g in tied:
            dist.reduce(g, group=ctx.dp_group, group_dst=0)
    if ctx.coords.dp == 0:
        _all_reduce_flat(tied, ctx.embedding_group)
    else:
        for g in tied:
            g.zero_()


def counts_in_norm(record: ParameterRecord, ctx: ParallelContext) -> bool:
    """Return whether this rank's copy is the one that the global norm counts and that is saved."""
    first = ctx.coords.tp % record.tp_copies == 0 if record.is_split else ctx.coords.tp == 0
    return record.tied_primary and first


def global_square_norm(
    grads: Iterable[RecordedGrad],
    ctx: ParallelContext,
    square_norm: Callable[[list[torch.Tensor]], torch.Tensor] | None = None,
    *,
    sharded: bool = False,
) -> torch.Tensor:
    """Return the sum of squares over the whole model of gradients already summed over dp: a scalar on the device.

    ``sharded``: each replica gives its own pieces of them.

    Each logical element is counted once: replicated parameters on tp rank 0, key/value heads on the first rank that
    holds them, tied ones on their primary stage, padding never (its gradient is zero). ``square_norm``: of a list of
    tensors; None: torch's ops.
    """
    mine = [g.detach() for record, g in grads if counts_in_norm(record, ctx)]
    if square_norm is not None and mine:
        total = square_norm(mine)
    else:
        wide = torch.float64 if mine and mine[0].dtype == torch.float64 else torch.float32
        squares = [g.to(wide).square().sum() for g in mine]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=wide, device=ctx.device)
    total = total.double()  # one dtype on all ranks, also where a rank has nothing to add
    for group in (ctx.dp_group if sharded else None, ctx.tp_group, ctx.pp_group):
        if group is not None:
            dist.all_reduce(total, group=group)
    return total
