"""Collectives of tensor and sequence parallelism, with their gradients.

Names follow Megatron-LM (Shoeybi et al., arXiv 1909.08053; Korthikanti et al.,
arXiv 2205.05198). A group of None means one rank: the function is the identity.
Sequence-parallel tensors are split along dimension 0, [seq/tp, batch, hidden].

| function | forward | backward |
|---|---|---|
| copy_to_tp | identity | all-reduce |
| reduce_from_tp | all-reduce | identity |
| gather_sequence | all-gather | reduce-scatter |
| reduce_scatter_sequence | reduce-scatter | all-gather |
| split_sequence | slice | all-gather |
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_port.parallel.compat import all_gather_single, reduce_scatter_single

Group = dist.ProcessGroup | None


def all_reduce_sum(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum over the group, out of place."""
    if group is None:
        return x
    out = x.contiguous().clone()
    dist.all_reduce(out, group=group)
    return out


def all_gather_first(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Concatenate the ranks' tensors along dimension 0: [n, ...] → [n * size, ...]."""
    if group is None:
        return x
    size = dist.get_world_size(group)
    out = torch.empty((x.shape[0] * size, *x.shape[1:]), dtype=x.dtype, device=x.device)
    all_gather_single(out, x.contiguous(), group=group)
    return out


def reduce_scatter_first(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum over the group and keep this rank's piece of dimension 0: [n * size, ...] → [n, ...]."""
    if group is None:
        return x
    size = dist.get_world_size(group)
    if x.shape[0] % size:
        raise ValueError(f"dimension 0 has {x.shape[0]} elements, not divisible by the group's {size} ranks")
    out = torch.empty((x.shape[0] // size, *x.shape[1:]), dtype=x.dtype, device=x.device)
    reduce_scatter_single(out, x.contiguous(), group=group)
    return out


def slice_first(x: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's piece of dimension 0."""
    if group is None:
        return x
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    n = x.shape[0] // size
    return x[rank * n : (rank + 1) * n].contiguous()


class _CopyToTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return all_reduce_sum(grad, ctx.group), None


class _ReduceFromTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        return all_reduce_sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return all_gather_first(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return reduce_scatter_first(grad, ctx.group), None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return reduce_scatter_first(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return all_gather_first(grad, ctx.group), None


class _SplitSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return slice_first(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return all_gather_first(grad, ctx.group), None


def copy_to_tp(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Enter a tensor-parallel region: every rank uses all of ``x``; gradients are summed."""
    return x if group is None else _CopyToTP.apply(x, group)


def reduce_from_tp(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Leave a tensor-parallel region: partial sums become the sum on every rank."""
    return x if group is None else _ReduceFromTP.apply(x, group)


def gather_sequence(x: torch.Tensor, group: Group) -> torch.Tensor:
    """[seq/tp, ...] → [seq, ...] for a region where each rank works on all tokens; gradients are summed."""
    return x if group is None else _GatherSequence.apply(x, group)


def reduce_scatter_sequence(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Partial sums [seq, ...] → this rank's tokens of the sum, [seq/tp, ...]."""
    return x if group is None else _ReduceScatterSequence.apply(x, group)


def split_sequence(x: torch.Tensor, group: Group) -> torch.Tensor:
    """A replicated [seq, ...] → this rank's tokens; the gradient is gathered back."""
    return x if group is None else _SplitSequence.apply(x, group)
