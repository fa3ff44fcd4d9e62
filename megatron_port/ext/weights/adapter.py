"""Low-rank adapters beside a linear's frozen weight: y = x Wᵀ + s (x Aᵀ) Bᵀ + b (Hu et al., arXiv 2106.09685).

Both products stay on their rank. A column-parallel linear has A whole and its own rows of B; each rank's gradient of A
comes from its own outputs, and dx of both products leaves in one collective. A row-parallel linear has its own columns
of A and B whole; x Aᵀ is then a part of a sum, and what B makes of it is summed with the linear's own output.

Under DoRA (Liu et al., arXiv 2402.09353) the rows of W + s B A are scaled to trained lengths; as there (section 4.3),
their present lengths are constants for the gradient.

Where parameters have a ``wgrad_accumulator`` (``layers.linear``), gradients are added to its wide sums, as those of
other matrices are: a sum over a micro-batch's tokens in fp16 overflows by how many tokens a micro-batch has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megatron_port.core.dist.collectives import (
    Group,
    all_gather_first,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megatron_port.core.layers import fused as cpu_upcast
from megatron_port.core.layers.fused import FirstOrderFunction, first_order
from megatron_port.core.layers.linear_kernels import LinearKernels, add_product

Drop = Callable[[torch.Tensor], torch.Tensor]
"""Dropout of [rows, batch, features] that drops the same elements each time."""


class _Adapted(FirstOrderFunction):
    """x Wᵀ + s (drop(x) Aᵀ) Bᵀ + b, at the entry of a tensor-parallel region where there is a ``group``."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor, scale: float,
        drop: Drop | None, group: Group, sequence: bool, kernels: LinearKernels, places: Sequence[_Place],
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        """``places``: where the gradients of A and B are added; none: they are returned."""
        whole = all_gather_first(x, group) if sequence else x
        weights_2d = [w.flatten(0, -2) for w in weights]
        sizes = [w.shape[0] for w in weights_2d]
        biases = [None] * len(weights) if bias is None else bias.split(sizes)
        results = [kernels.forward(whole, w, w_2d, part)[0] for w, w_2d, part in zip(weights, weights_2d, biases)]
        y = results[0] if len(results) == 1 else torch.cat(results, dim=-1)
        low = cpu_upcast.linear(whole if drop is None else drop(whole), a)
        y.add_(cpu_upcast.linear(low, b), alpha=scale)
        ctx.save_for_backward(x, low, a, b, *weights)
        # The weights are also kept as they are: a saved tensor may be unpacked without the parameter's attributes.
        ctx.weights, ctx.sizes, ctx.scale, ctx.drop, ctx.places = weights, sizes, scale, drop, places
        ctx.group, ctx.sequence, ctx.kernels = group, sequence, kernels
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, low, a, b, *weights = ctx.saved_tensors
        grad_2d, low_2d = grad.flatten(0, -2), low.flatten(0, -2)
        gathered = start_all_gather(x, ctx.group) if ctx.sequence else None
        d_low = cpu_upcast.product(grad_2d, b).mul_(ctx.scale)
        dx = _start_dx(ctx, grad, d_low, a, weights) if ctx.needs_input_grad[0] else None
        da = db = None
        for place in ctx.places:
            place.add_b(grad_2d, low_2d, ctx.scale)
        if not ctx.places:
            db = cpu_upcast.product(grad_2d.t(), low_2d).mul_(ctx.scale)
        whole = x.detach() if gathered is None else gathered.take()
        read_2d = (whole if ctx.drop is None else ctx.drop(whole)).flatten(0, -2)
        for place in ctx.places:
            place.add_a(d_low, read_2d)
        if not ctx.places:
            da = cpu_upcast.product(d_low.t(), read_2d)
        d_bias = grad_2d.sum(dim=0) if ctx.needs_input_grad[1] else None
        return (None if dx is None else dx.take(), d_bias, da, db, *[None] * (6 + len(weights)))


def _start_dx(ctx: Any, grad: torch.Tensor, d_low: torch.Tensor, a: torch.Tensor, weights: list[torch.Tensor]) -> Any:
    """Start summing the input's gradient over the group: of the weights' products and of the adapter's."""
    shape = (*grad.shape[:-1], a.shape[1])
    dx = cpu_upcast.product(d_low, a).view(shape)
    if ctx.drop is not None:
        dx = ctx.drop(dx)
    dx_2d = dx.flatten(0, -2)
    for part, weight, matrix in zip(grad.flatten(0, -2).split(ctx.sizes, dim=1), ctx.weights, weights):
        for_dgrad, _ = ctx.kernels.prepare_grad_output(part.contiguous())
        dx_2d.add_(ctx.kernels.dgrad(for_dgrad, weight, matrix.flatten(0, -2)))
    return (start_reduce_scatter if ctx.sequence else start_all_reduce)(dx, ctx.group)


@dataclass(frozen=True)
class AdapterPart:
    """This rank's rows of one matrix that is in the weight, and their adapter.

    ``rows``: of each group of rows; ``a`` [r, in], ``b`` [out, r], ``magnitude`` [out] (DoRA): None where there is
    none.
    """

    name: str
    rows: int
    a: nn.Parameter | None = None
    b: nn.Parameter | None = None
    magnitude: nn.Parameter | None = None


def _accumulates(parameter: nn.Parameter | None) -> bool:
    """Return whether an engine takes the gradient of a parameter as it arises."""
    return parameter is not None and parameter.requires_grad and hasattr(parameter, "wgrad_accumulator")


@dataclass(frozen=True)
class _Place:
    """Where one part's A and B are in those of all parts (:meth:`Adapter.matrices`)."""

    part: AdapterPart
    ranks: slice
    """Rows of A, columns of B."""
    rows: slice
    """In each group of rows of B."""
    groups: int

    def add_b(self, grad_2d: torch.Tensor, low_2d: torch.Tensor, scale: float) -> None:
        """Add the gradient of B: of outputs [tokens, out] and what they were made of [tokens, Σ r]."""
        mine = grad_2d.reshape(len(grad_2d), self.groups, -1)[:, :, self.rows].flatten(1)
        b: Any = self.part.b
        b.wgrad_accumulator.add(b, add_product, mine, low_2d[:, self.ranks], overwrites=True, scale=scale)

    def add_a(self, d_low: torch.Tensor, read_2d: torch.Tensor) -> None:
        """Add the gradient of A: of x Aᵀ [tokens, Σ r] and x [tokens, in]."""
        a: Any = self.part.a
        a.wgrad_accumulator.add(a, add_product, d_low[:, self.ranks], read_2d, overwrites=True)


class _Scaled(FirstOrderFunction):
    """y times a factor for each of its columns, length / ``lengths``; gradients of the lengths are summed wide and
    added to the sums of the ``parts``. ``magnitudes``: those of the parts, to be part of the graph."""

    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, factors: torch.Tensor, lengths: torch.Tensor, parts: Sequence[AdapterPart],
        groups: int, *magnitudes: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(y, factors, lengths)
        ctx.parts, ctx.groups = parts, groups
        return y * factors

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        y, factors, lengths = ctx.saved_tensors
        wide = torch.promote_types(y.dtype, torch.float32)
        d_lengths = torch.einsum("to,to->o", grad.flatten(0, -2).to(wide), y.flatten(0, -2).to(wide)) / lengths
        by_part = d_lengths.view(ctx.groups, -1).split([part.rows for part in ctx.parts], dim=1)
        for part, found in zip(ctx.parts, by_part):
            if part.magnitude is not None:
                magnitude: Any = part.magnitude
                magnitude.wgrad_accumulator.add(magnitude, _add_flat, found)
        return (grad * factors, *[None] * (4 + sum(part.magnitude is not None for part in ctx.parts)))


def _add_flat(main_grad: torch.Tensor, gradient: torch.Tensor) -> None:
    main_grad.view(-1).add_(gradient.reshape(-1))


class Adapter(nn.Module):
    """The adapters of one linear, whose rows are ``groups`` times those of its ``parts``, in order.

    Args:
        scale: s.
        drop_for: the dropout of an input of so many rows in this pass; None: nothing is dropped.
        norm_group: ranks that hold other columns of the weight (DoRA); None: no other rank does.
    """

    def __init__(
        self, parts: Sequence[AdapterPart], *, groups: int, scale: float, drop_for: Callable[[int], Drop | None],
        norm_group: Group = None,
    ) -> None:
        super().__init__()
        self.parts, self.groups, self.scale, self.drop_for = tuple(parts), groups, scale, drop_for
        self.norm_group = norm_group
        for part in parts:
            for kind in ("a", "b", "magnitude"):
                if getattr(part, kind) is not None:
                    self.register_parameter(f"{part.name}_{kind}", getattr(part, kind))
        self.scales_rows = any(part.magnitude is not None for part in parts)

    def matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A and B of all parts as one pair: A's one below the other, [Σ r, in]; B's beside one another in the
        rows of their parts, zero elsewhere, [out, Σ r]."""
        pairs = [(part.a, part.b) for part in self.parts if part.a is not None and part.b is not None]
        if len(self.parts) == 1:
            return pairs[0]
        a = torch.cat([a for a, _ in pairs])
        rank, total, before = pairs[0][0].shape[0], a.shape[0], 0
        blocks = []
        for part in self.parts:
            if part.b is None:
                blocks.append(a.new_zeros(self.groups, part.rows, total))
                continue
            blocks.append(F.pad(part.b.view(self.groups, part.rows, rank), (before, total - before - rank)))
            before += rank
        return a, torch.cat(blocks, dim=1).flatten(0, 1)

    def forward(
        self, x: torch.Tensor, weights: tuple[torch.Tensor, ...], bias: torch.Tensor | None, *, group: Group,
        sequence: bool, kernels: LinearKernels,
    ) -> torch.Tensor:
        """Return the adapted product of x [seq(/tp), batch, in] with ``weights`` [..., in], whose rows follow one
        another; on a row-parallel linear this rank's part of the sum."""
        a, b = self.matrices()
        rows = x.shape[0] * (dist.get_world_size(group) if sequence and group is not None else 1)
        late = bias if self.scales_rows else None
        y: torch.Tensor = _Adapted.apply(
            x, None if self.scales_rows else bias, a, b, self.scale, self.drop_for(rows), group,
            sequence and group is not None, kernels, list(self._places()), *weights,
        )
        if self.scales_rows:
            y = self._scaled(y, weights, a, b)
        return y if late is None else y + late

    def _places(self) -> Iterator[_Place]:
        """Yield where to add the gradients of each part; nothing unless all of them have accumulators."""
        adapted = [part for part in self.parts if part.a is not None]
        if not all(_accumulates(part.a) and _accumulates(part.b) for part in adapted):
            return
        ranks = rows = 0
        for part in self.parts:
            if part.a is not None:
                rank = part.a.shape[0]
                yield _Place(part, slice(ranks, ranks + rank), slice(rows, rows + part.rows), self.groups)
                ranks += rank
            rows += part.rows

    def _scaled(
        self, y: torch.Tensor, weights: Sequence[torch.Tensor], a: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        """Return y with its columns times :meth:`row_factors`."""
        factors, lengths = self.row_factors(weights, a, b)
        magnitudes = [part.magnitude for part in self.parts if part.magnitude is not None]
        if not all(_accumulates(magnitude) for magnitude in magnitudes):
            return y * factors
        scaled: torch.Tensor = _Scaled.apply(y, factors.detach(), lengths, self.parts, self.groups, *magnitudes)
        return scaled

    def row_factors(
        self, weights: Sequence[torch.Tensor], a: torch.Tensor, b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return trained length / present length of each row, [out], 1 where a part has no adapter, and the latter."""
        lengths = self._lengths(weights, a.detach(), b.detach())
        present = lengths.view(self.groups, -1).split([part.rows for part in self.parts], dim=1)
        wanted = [
            now if part.magnitude is None else part.magnitude.view(self.groups, part.rows)
            for part, now in zip(self.parts, present)
        ]
        return (wanted[0] if len(wanted) == 1 else torch.cat(wanted, dim=1)).flatten() / lengths, lengths

    @torch.no_grad()
    def _lengths(self, weights: Sequence[torch.Tensor], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return the lengths of the rows of W + s B A, without making it: |W|² + 2 s (W Aᵀ) B + s² B (A Aᵀ) B."""
        wide = torch.promote_types(a.dtype, torch.float32)
        rows = [w.flatten(0, -2) for w in weights]
        own = torch.cat([torch.linalg.vector_norm(w, dim=1, dtype=wide) for w in rows]).square()
        both = torch.cat([cpu_upcast.linear(w, a) for w in rows]).to(wide) * 2 + b.to(wide) @ (a @ a.t()).to(wide).mul(
            self.scale
        )
        square = own + (both * b.to(wide)).sum(dim=1).mul(self.scale)
        if self.norm_group is not None:
            dist.all_reduce(square, group=self.norm_group)
        return square.sqrt().to(a.dtype)
