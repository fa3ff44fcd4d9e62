"""Collectives of tensor and sequence parallelism, with their gradients.

Names follow Megatron-LM (Shoeybi et al., arXiv 1909.08053; Korthikanti et al.,
arXiv 2205.05198). A group of None means one rank: the function is the identity.
Sequence-parallel tensors are split along dimension 0, [seq/tp, batch, hidden].
These leave a tensor-parallel region; its entry is part of ``linear.linear``, which hides
the collective of the backward pass.

| function | forward | backward |
|---|---|---|
| reduce_from_tp | all-reduce | identity |
| reduce_scatter_sequence | reduce-scatter | all-gather |

``enter_region`` is that entry alone, for a tensor that heads on all ranks share.

| function | forward | backward |
|---|---|---|
| enter_region | identity, under sequence parallelism all-gather | all-reduce, under it reduce-scatter |

Between layers of which every rank has all tokens, one may give each rank its share of them.

| function | forward | backward |
|---|---|---|
| take_share | own tokens | all-gather |
| join_shares | all-gather | own tokens |
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_port.core.dist.compat import all_gather_single, reduce_scatter_single

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


class Started:
    """Collective in flight, and the tensor that it will fill."""

    def __init__(self, work: dist.Work | None, out: torch.Tensor, *inputs: torch.Tensor) -> None:
        self._work, self._out, self._inputs = work, out, inputs  # inputs live until the collective has read them

    def take(self) -> torch.Tensor:
        """Wait for the collective and return its result. On a GPU the stream waits, not the host."""
        if self._work is not None:
            self._work.wait()
        self._inputs = ()
        return self._out


def start_all_reduce(x: torch.Tensor, group: Group) -> Started:
    """Start the sum over the group, in place."""
    return Started(None if group is None else dist.all_reduce(x, group=group, async_op=True), x)


def start_all_gather(x: torch.Tensor, group: Group) -> Started:
    """Start concatenating along dimension 0: [n, ...] → [n * size, ...]."""
    if group is None:
        return Started(None, x)
    x = x.contiguous()
    out = torch.empty((x.shape[0] * dist.get_world_size(group), *x.shape[1:]), dtype=x.dtype, device=x.device)
    return Started(all_gather_single(out, x, group=group, async_op=True), out, x)


def start_reduce_scatter(x: torch.Tensor, group: Group) -> Started:
    """Start a reduce-scatter along dimension 0: [n * size, ...] → [n, ...]."""
    if group is None:
        return Started(None, x)
    x, size = x.contiguous(), dist.get_world_size(group)
    out = torch.empty((x.shape[0] // size, *x.shape[1:]), dtype=x.dtype, device=x.device)
    return Started(reduce_scatter_single(out, x, group=group, async_op=True), out, x)


class _ReduceFromTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        return all_reduce_sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return reduce_scatter_first(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_gather_first(grad, ctx.group), None


def reduce_from_tp(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Leave a tensor-parallel region: partial sums become the sum on every rank."""
    return x if group is None else _ReduceFromTP.apply(x, group)  # type: ignore[no-untyped-call]


def reduce_scatter_sequence(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Partial sums [seq, ...] → this rank's tokens of the sum, [seq/tp, ...]."""
    return x if group is None else _ReduceScatterSequence.apply(x, group)  # type: ignore[no-untyped-call]


class _EnterRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, sequence: bool) -> torch.Tensor:
        ctx.group, ctx.sequence = group, sequence
        return all_gather_first(x, group) if sequence else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        reduce = reduce_scatter_first if ctx.sequence else all_reduce_sum
        return reduce(grad, ctx.group), None, None


def enter_region(x: torch.Tensor, group: Group, sequence_parallel: bool) -> torch.Tensor:
    """Enter a tensor-parallel region, where every rank uses all of x: [seq(/tp), ...] → [seq, ...]; gradients are
    summed."""
    return x if group is None else _EnterRegion.apply(x, group, sequence_parallel)  # type: ignore[no-untyped-call]


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return _own(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_gather_first(grad, ctx.group), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return all_gather_first(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _own(grad, ctx.group).contiguous(), None


def _own(x: torch.Tensor, group: Group) -> torch.Tensor:
    rows = x.shape[0] // dist.get_world_size(group)
    return x.narrow(0, dist.get_rank(group) * rows, rows)


def take_share(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return this rank's tokens [seq/tp, ...] of what all ranks hold alike, [seq, ...]; gradients are gathered."""
    return x if group is None else _Share.apply(x, group)  # type: ignore[no-untyped-call]


def join_shares(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return all ranks' tokens [seq, ...] from this rank's, [seq/tp, ...]; each takes its own tokens' gradient, since
    every rank has all of it."""
    return x if group is None else _Join.apply(x, group)  # type: ignore[no-untyped-call]
