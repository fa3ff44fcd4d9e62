"""Sums of gradients that DeepSpeed does not know of, driven by the parameter records."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import REPLICAS, MeshDims
from megatron_port.core.optim.gradients import RecordedGradient, all_reduce_flat


def reduce_partial_gradients(grads: Iterable[RecordedGradient], ctx: ParallelContext) -> None:
    """Sum the gradients that are partial along more axes than those of the data, in place.

    Along tp where sequence parallelism gives each rank its own tokens; along the copies of key/value heads, each of
    which has only its query heads' part.
    """
    data = ctx.mesh.dims(*REPLICAS)
    alike: dict[tuple[bool, MeshDims], list[torch.Tensor]] = {}
    for record, g in grads:
        alike.setdefault((record.sums_query_heads(ctx.mesh), record.reduces_over(ctx.mesh) - data), []).append(g)
    for heads, beyond in sorted(alike, key=lambda kind: (kind[0], sorted(kind[1]))):
        group = ctx.along(beyond)
        if group is not None:
            all_reduce_flat(alike[heads, beyond], group)


def reduce_tied_gradients_first(grads: Iterable[RecordedGradient], ctx: ParallelContext) -> None:
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
