"""Token counts and loss sums of a step, reduced over replicas and known to all stages; both engines use them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.data.objective import Objective
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import REPLICAS
from megatron_port.core.layers.step import AuxiliarySums


def global_count(
    micro_batches: Sequence[MicroBatch], objective: Objective, ctx: ParallelContext, *, seq_length: int
) -> float:
    """Return the denominator of a step's mean loss (loss tokens, or pairs) over all replicas, on every rank before its
    first forward pass.

    Where nothing is masked, every rank knows the count. Masks are on the last stage only, which all-reduces the count
    over its replicas and broadcasts it to the other stages: 8 bytes, and a host synchronisation, because the loss
    factor is a number. Collective.
    """
    if ctx.size("pp") > 1 and any(b.loss_mask is not None and not b.labels_masked for b in micro_batches):
        raise ValueError(
            "a micro-batch has a loss_mask and labels_masked is False: the stages without the mask would not take part "
            "in counting tokens, and all would wait for ever; set labels_masked on every stage"
        )
    known = [objective.known_count(b, seq_length) for b in micro_batches]
    if None not in known:
        return float(sum(n for n in known if n is not None) * ctx.size("dp"))
    total = torch.zeros((), dtype=torch.float64, device=ctx.device)
    if ctx.is_last_stage:  # masks on the device are not waited for one by one
        total += sum(objective.count(b, seq_length / ctx.size("cp")) for b in micro_batches)
        replicas = ctx.over(*REPLICAS)
        if replicas is not None:
            dist.all_reduce(total, group=replicas)
    stages = ctx.over("pp")
    if stages is not None:
        dist.broadcast(total, group=stages, group_src=ctx.topology.last_stage)
    return float(total)


def global_samples(micro_batches: Sequence[MicroBatch], ctx: ParallelContext) -> int:
    """Return the number of samples of a step over all replicas."""
    return sum(len(b.sample_ids) for b in micro_batches) * ctx.size("dp")


def term_counts(micro_batches: Sequence[MicroBatch], objective: Objective, ctx: ParallelContext) -> tuple[float, ...]:
    """Return the denominators of the objective's additional terms over all replicas; empty on all stages but the last,
    which alone uses them. Collective over its replicas."""
    if not (objective.terms and ctx.is_last_stage):
        return ()
    counts, divided = torch.zeros(objective.terms, dtype=torch.float64), ctx.size("cp") > 1
    for batch in micro_batches:
        counts += objective.term_counts(batch, divided=divided)
    if not divided and not any(b.masked or b.document_starts is not None or b.side for b in micro_batches):
        return tuple((counts * ctx.size("dp")).tolist())  # every replica counts the same
    counts, replicas = counts.to(ctx.device), ctx.over(*REPLICAS)
    if replicas is not None:
        dist.all_reduce(counts, group=replicas)
    return tuple(counts.tolist())


def loss_weight(tokens: float) -> float:
    """Return the factor from the sum of token losses to their mean; ``tokens``: of :func:`global_count`.

    Where every label is masked it is 1, as in Megatron-LM, which takes at least one token: the sum is 0 and so is
    every gradient.
    """
    return 1.0 / max(tokens, 1.0)


def device_sums(values: Sequence[torch.Tensor | float], ctx: ParallelContext) -> torch.Tensor:
    """Sum values of the last stage over replicas; float64 [n] on the device of every rank.

    Tensor-parallel ranks each computed them; all take those of the first, so that a fault on one of them cannot make
    ranks decide differently about a step.
    """
    packed = torch.stack([
        v.double() if isinstance(v, torch.Tensor) else torch.full((), v, dtype=torch.float64, device=ctx.device)
        for v in values
    ])
    return summed_over_replicas(packed, ctx)


def summed_over_replicas(packed: torch.Tensor, ctx: ParallelContext) -> torch.Tensor:
    """Sum over replicas, in place, what the last stage holds; the same on every rank, as :func:`device_sums`."""
    replicas, stages, tensor = ctx.over(*REPLICAS), ctx.over("pp"), ctx.over("tp")
    if replicas is not None:
        dist.all_reduce(packed, group=replicas)
    if stages is not None:
        dist.broadcast(packed, group=stages, group_src=ctx.topology.last_stage)
    if tensor is not None:
        dist.broadcast(packed, group=tensor, group_src=0)
    return packed


def shared_sums(values: Sequence[torch.Tensor | float], ctx: ParallelContext) -> list[float]:
    """Return :func:`device_sums` as floats: a host synchronisation."""
    return [float(v) for v in device_sums(values, ctx).tolist()]


def reduced_auxiliary(sums: AuxiliarySums, ctx: ParallelContext) -> torch.Tensor:
    """Return modules' named sums of a step over replicas and stages, on every rank: float64 [names] on the device.

    Tensor-parallel ranks take those of the first, as in :func:`device_sums`. Collective, unless the model has no names.
    """
    values = sums.values.clone()
    if sums.names:
        for group in (ctx.over(*REPLICAS), ctx.over("pp")):
            if group is not None:
                dist.all_reduce(values, group=group)
        tensor = ctx.over("tp")
        if tensor is not None:
            dist.broadcast(values, group=tensor, group_src=0)
    return values


def skip_for_loss(sums: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """Return 1, to skip the update, if the mean of (loss sum, tokens) is above ``limit`` or not finite; else 0.

    ``limit``: finite float64 scalar on the device, as the result, which is float32.
    """
    return (~(sums[0] / sums[1].clamp(min=1.0) <= limit)).float()
