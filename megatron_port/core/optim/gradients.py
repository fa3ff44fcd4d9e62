"""Reductions of gradients between the last backward pass and the update, driven by the parameter records.

Both engines use these, so a layout's gradient rules exist once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from megatron_port.core.dist.context import ParallelContext
from megatron_port.core.dist.mesh import REPLICAS, Factors
from megatron_port.core.dist.record import ParameterRecord

RecordedGrad = tuple[ParameterRecord, torch.Tensor]


def all_reduce_flat(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
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
    """Sum the gradients that are partial along more axes than those of the data, in place.

    Along tp where sequence parallelism gives each rank its own tokens; along the copies of key/value heads, each of
    which has only its query heads' part.
    """
    data = ctx.mesh.factors(*REPLICAS)
    alike: dict[tuple[bool, Factors], list[torch.Tensor]] = {}
    for record, g in grads:
        alike.setdefault((record.sums_query_heads(ctx.mesh), record.reduces_over(ctx.mesh) - data), []).append(g)
    for heads, beyond in sorted(alike, key=lambda kind: (kind[0], sorted(kind[1]))):
        group = ctx.along(beyond)
        if group is not None:
            all_reduce_flat(alike[heads, beyond], group)


def reduce_tied_gradients_first(grads: Iterable[RecordedGrad], ctx: ParallelContext) -> None:
    """Sum gradients of tied parameters over the stages that hold a copy, for an engine that sums over replicas later.

    The two stages' replica groups may add in different orders (their buffers differ), and copies whose gradients differ
    in the last bit drift apart. So the gradients of tied parameters are summed onto the first replica, there over the
    stages, and are zero on the other replicas, so that the later sum adds zeros to them. In place.
    """
    tied = [g for record, g in grads if record.tied_key is not None]
    if not tied or ctx.embedding_group is None:
        return
    replicas = ctx.over(*REPLICAS)
    if replicas is not None:
        for g in tied:
            dist.reduce(g, group=replicas, group_dst=0)
    if ctx.index(*REPLICAS) == 0:
        all_reduce_flat(tied, ctx.embedding_group)
    else:
        for g in tied:
            g.zero_()


def owned_gradients(
    grads: Iterable[RecordedGrad], ctx: ParallelContext, *, spread: Factors = frozenset()
) -> list[torch.Tensor]:
    """Return the gradients of which this rank owns the parameter (``ParameterRecord.is_owned``).

    Those of all ranks hold each logical element once; of padding the gradient is zero.

    ``spread``: factors along which each rank gives its own pieces of the gradients (ZeRO).
    """
    return [g.detach() for record, g in grads if record.is_owned(ctx.mesh, ctx.rank, spread=spread)]


def global_square_norm(
    owned: Sequence[torch.Tensor],
    ctx: ParallelContext,
    square_norm: Callable[[list[torch.Tensor]], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the sum of squares of all final gradients of the model, a float64 scalar on the device. Collective.

    Args:
        owned: this rank's ``owned_gradients``.
        square_norm: of a list of tensors; None: torch's ops.
    """
    if square_norm is not None and owned:
        total = square_norm(list(owned))
    else:
        wide = torch.float64 if owned and owned[0].dtype == torch.float64 else torch.float32
        squares = [g.to(wide).square().sum() for g in owned]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=wide, device=ctx.device)
    total = total.double()  # one dtype on all ranks, also where a rank has nothing to add
    # Owners may lie anywhere on the mesh, so one sum over all ranks is right whatever axes a parameter lies along.
    if ctx.world_group is not None:
        dist.all_reduce(total, group=ctx.world_group)
    return total
