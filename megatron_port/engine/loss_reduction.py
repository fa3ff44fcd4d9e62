"""Counts and sums that both engines need: once per step, over replicas, from the last stage to all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_port.data.batch import MicroBatch
from megatron_port.parallel.context import ParallelContext


def global_tokens(micro_batches: Sequence[MicroBatch], ctx: ParallelContext, *, seq_length: int) -> float:
    """Return the loss tokens of a step over all replicas.

    Where nothing is masked the count is known. Masks live on the last stage only, which sums them over its replicas
    before the first backward pass (the loss is divided by the result); other stages do not use the number.
    """
    if ctx.is_last_stage and any(b.loss_mask is not None for b in micro_batches):
        count = sum(
            float(b.loss_mask.sum()) if b.loss_mask is not None else len(b.sample_ids) * seq_length
            for b in micro_batches
        )
        if ctx.dp_group is None:
            return float(count)
        total = torch.tensor(count, dtype=torch.float64, device=ctx.device)
        dist.all_reduce(total, group=ctx.dp_group)
        return float(total)
    return float(sum(len(b.sample_ids) for b in micro_batches) * seq_length * ctx.topology.dp)


def loss_weight(tokens: float) -> float:
    """Return what the sum of token losses is multiplied by to give the mean; ``tokens``: of :func:`global_tokens`.

    Where every label is masked it is 1, as in Megatron-LM, which takes at least one token: the sum is 0 and so is
    every gradient.
    """
    return 1.0 / max(tokens, 1.0)


def device_sums(values: Sequence[torch.Tensor | float], ctx: ParallelContext) -> torch.Tensor:
    """Sum over replicas the values that the last stage knows; float64 [n] on the device of every rank.

    The tensor-parallel ranks computed them each for itself; all take the first's, so that no fault in one of them
    makes them decide differently on a step.
    """
    packed = torch.stack([
        v.double() if isinstance(v, torch.Tensor) else torch.full((), v, dtype=torch.float64, device=ctx.device)
        for v in values
    ])
    if ctx.dp_group is not None:
        dist.all_reduce(packed, group=ctx.dp_group)
    if ctx.pp_group is not None:
        source = ctx.topology.stage_peer(ctx.rank, ctx.topology.last_stage)
        dist.broadcast(packed, src=source, group=ctx.pp_group)
    if ctx.tp_group is not None:
        dist.broadcast(packed, group=ctx.tp_group, group_src=0)
    return packed


def shared_sums(values: Sequence[torch.Tensor | float], ctx: ParallelContext) -> list[float]:
    """Return :func:`device_sums` as floats: a host synchronisation."""
    return [float(v) for v in device_sums(values, ctx).tolist()]


def refused_loss(sums: torch.Tensor, limit: float) -> torch.Tensor:
    """Return 1 if the mean of (loss sum, tokens) is not finite or above a finite ``limit``, else 0: float32 scalar."""
    return (~(sums[0] / sums[1].clamp(min=1.0) <= limit)).float()
