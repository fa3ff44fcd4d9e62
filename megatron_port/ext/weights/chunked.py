"""Forward products of tensor parallelism in chunks of their rows, each beside the collective of another chunk.

The collective of a region's exit (all-reduce, or reduce-scatter under sequence parallelism) starts as soon as one
chunk's product is there, and the gathers at its entry run ahead of the products. Each row's sum is made as without
chunks, as far as the library sums alike in products of fewer rows. No tensor is copied: chunks of a sequence-parallel
tensor are a strided batch with a matrix for each rank, and results are written in place. Backward passes are those of
``linear``, whose collectives already run beside another product, but for the gather that undoes a reduce-scatter.

Rows are [ranks, chunks, rows of a chunk]: chunk i of what a rank keeps comes from the ith part of each rank's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_port.core.config.schema import LayoutConfig
from megatron_port.core.dist.collectives import Group, all_gather_first, all_gather_single, reduce_scatter_single
from megatron_port.core.dist.device_streams import COMPUTE, access, in_flight
from megatron_port.core.layers.fused import add_bias, first_order, widens
from megatron_port.core.layers.linear import PLAIN, ColumnParallelLinear, LinearKernels, RowParallelLinear, _Linear
from megatron_port.ext.weights.exchanged import ExchangedColumnLinear, ExchangedRowLinear, prepare_entry
from megatron_port.ext.weights.few_bits import forward_operand


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Write x Wᵀ + b to ``out``: [n, rows, in], [features, in], [features] → [n, rows, features]; n may be strided."""
    access(COMPUTE, "a chunk's product", reads=[x], writes=[out])
    if widens(x):
        out.copy_(PLAIN.forward(x, weight, weight, bias)[0])
        return
    batched = weight.t().expand(x.shape[0], -1, -1)
    if bias is None:
        torch.bmm(x, batched, out=out)
    else:
        torch.baddbmm(bias, x, batched, out=out)


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def _sum_chunks(x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup, chunks: int) -> torch.Tensor:
    """x Wᵀ summed over the group, [rows, batch, in] → [rows, batch, out]."""
    rows, batch, _ = x.shape
    out = x.new_empty(rows, batch, weight.shape[0])
    works = []
    for part, mine in zip(x.chunk(chunks), out.chunk(chunks)):
        _multiply(part.view(1, -1, x.shape[2]), weight, None, mine.view(1, -1, weight.shape[0]))
        work = dist.all_reduce(mine, group=group, async_op=True)
        works.append(in_flight(work, "sum of a chunk", reads=[mine], writes=[mine]))
    _wait(works)
    access(COMPUTE, "the chunks' sums are used", reads=[out])
    return out


def _scatter_chunks(x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup, chunks: int) -> torch.Tensor:
    """x Wᵀ summed over the group, of which each rank keeps its rows, [rows, batch, in] → [rows / ranks, batch, out]."""
    ranks = dist.get_world_size(group)
    rows, batch, width = x.shape
    split = x.view(ranks, chunks, -1, width)
    out = x.new_empty(rows // ranks, batch, weight.shape[0])
    works, partials = [], []
    for i, mine in enumerate(out.chunk(chunks)):
        partial = x.new_empty(ranks, split.shape[2], weight.shape[0])
        _multiply(split[:, i], weight, None, partial)
        work = reduce_scatter_single(mine.view(-1), partial.view(-1), group=group, async_op=True)
        works.append(in_flight(work, "reduce-scatter of a chunk", reads=[partial], writes=[mine]))
        partials.append(partial)  # alive until the collective has read it
    _wait(works)
    access(COMPUTE, "the chunks' sums are used", reads=[out])
    return out


def _gather_chunks(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup, chunks: int
) -> torch.Tensor:
    """X Wᵀ + b for the rows X of all ranks, [rows, batch, in] → [rows · ranks, batch, out]."""
    ranks = dist.get_world_size(group)
    rows, batch, width = x.shape
    out = x.new_empty(rows * ranks, batch, weight.shape[0])
    split = out.view(ranks, chunks, -1, weight.shape[0])
    works, gathered = [], []
    for part in x.chunk(chunks):
        whole = x.new_empty(ranks, part.shape[0] * batch, width)
        work = all_gather_single(whole.view(-1), part.reshape(-1), group=group, async_op=True)
        works.append(in_flight(work, "gather of a chunk", reads=[part], writes=[whole]))
        gathered.append(whole)
    for i, (work, whole) in enumerate(zip(works, gathered)):
        work.wait()
        _multiply(whole, weight, bias, split[:, i])
    return out


class _Leaving(_Linear):
    """Row-parallel product and the sum that leaves the region. ``how``: group, sequence parallel or not, chunks."""

    @staticmethod
    def forward(  # type: ignore[override]  # how in place of the entry's group
        ctx: Any, x: torch.Tensor, bias: None, how: tuple[dist.ProcessGroup, bool, int], sequence: bool,
        kernels: LinearKernels, weight: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weights, ctx.group, ctx.sequence, ctx.kernels = (weight,), None, False, kernels
        ctx.sizes, ctx.saved_input_scales = [weight.shape[0]], [None]
        group, scatters, chunks = how
        ctx.gathers = group if scatters else None
        seen = forward_operand(kernels, weight)
        return (_scatter_chunks if scatters else _sum_chunks)(x.contiguous(), seen, group, chunks)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Linear.backward(ctx, all_gather_first(grad, ctx.gathers))


class _Entering(_Linear):
    """Column-parallel product of gathered tokens. ``how``: group and chunks."""

    @staticmethod
    def forward(  # type: ignore[override]  # how in place of the entry's group
        ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, how: tuple[dist.ProcessGroup, int], sequence: bool,
        kernels: LinearKernels, weight: torch.Tensor,
    ) -> torch.Tensor:
        group, chunks = how
        matrix = prepare_entry(ctx, x, weight, group, kernels)
        ctx.bias = bias
        return _gather_chunks(x, forward_operand(kernels, matrix), bias, group, chunks)


def _divides(x: torch.Tensor, group: Group, chunks: int, *, sequence: bool) -> bool:
    """Whether the rows of ``x`` divide into chunks of equal size on every rank: not those of a lone token."""
    ranks = dist.get_world_size(group) if sequence and group is not None else 1
    return x.shape[0] % (chunks * ranks) == 0


class ChunkedColumnParallelLinear(ColumnParallelLinear):
    """ColumnParallelLinear that gathers its input in ``chunks`` under sequence parallelism."""

    def __init__(self, chunks: int, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.chunks = chunks

    def forward(self, x: torch.Tensor, *, detach_bias: bool = False) -> torch.Tensor:
        plain = not self.sequence_parallel or self.group is None or self.shared_weight is not None
        if plain or not _divides(x, None, self.chunks, sequence=False):
            return super().forward(x, detach_bias=detach_bias)
        bias = self.added_bias(detach_bias)
        out: torch.Tensor = _Entering.apply(x, bias, (self.group, self.chunks), True, self.kernels, self.weight)
        return out


class ChunkedRowParallelLinear(RowParallelLinear):
    """RowParallelLinear that sums its output in ``chunks``."""

    def __init__(self, chunks: int, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.chunks = chunks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.group is None or not _divides(x, self.group, self.chunks, sequence=self.sequence_parallel):
            return super().forward(x)
        how = self.group, self.sequence_parallel, self.chunks
        y: torch.Tensor = _Leaving.apply(x, None, how, False, self.kernels, self.weight)
        return y if self.skip_bias else add_bias(y, self.bias)


def overlapped_column(layout: LayoutConfig, *arguments: Any, **options: Any) -> ColumnParallelLinear:
    """Return a ColumnParallelLinear of the form that a layout asks for, of those that overlap.

    Raises:
        EnvironmentFault: ``layout.tp_exchange`` names one that cannot serve this device.
    """
    if layout.tp_exchange != "collective":
        return ExchangedColumnLinear(layout.tp_exchange, *arguments, **options)
    return ChunkedColumnParallelLinear(layout.tp_overlap_chunks, *arguments, **options)


def overlapped_row(layout: LayoutConfig, *arguments: Any, **options: Any) -> RowParallelLinear:
    """Return a RowParallelLinear likewise."""
    if layout.tp_exchange != "collective":
        return ExchangedRowLinear(layout.tp_exchange, *arguments, **options)
    return ChunkedRowParallelLinear(layout.tp_overlap_chunks, *arguments, **options)
