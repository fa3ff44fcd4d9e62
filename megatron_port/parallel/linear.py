"""Linear layers split over tensor-parallel ranks (Shoeybi et al., arXiv 1909.08053).

``ColumnParallelLinear`` splits the output features, ``RowParallelLinear`` the
input features; between the two nothing is communicated. With sequence
parallelism (Korthikanti et al., arXiv 2205.05198) the region's entry gathers
the sequence and its exit reduce-scatters it, in place of the two all-reduces.

``linear`` adds a weight's gradient straight to the sum that an engine keeps of
it: no gradient of the weight's own dtype is made, rounded and added up. At the
entry of a region it hides the collective of the input's gradient behind that
product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from megatron_port.backend.cpu_upcast import widens
from megatron_port.parallel.collectives import (
    Group,
    all_gather_first,
    reduce_from_tp,
    reduce_scatter_sequence,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megatron_port.parallel.context import ParallelContext
from megatron_port.parallel.linear_kernels import PLAIN, LinearKernels, add_product
from megatron_port.parallel.mesh import REPLICAS
from megatron_port.parallel.record import SEQUENCE, InitSpec, ParameterRecord, Shard, attach, make_record

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "Rows", "WgradAccumulator", "add_product", "linear"]


def _main_grad(weight: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = weight.main_grad  # type: ignore[attr-defined]
    return total


class WgradAccumulator:
    """What an engine puts on its weights as ``weight_gradients``: where their products are added, and when they run.

    ``total(weight)`` is asked for the sum, contiguous, in float32 or wider, when the product runs; default:
    ``weight.main_grad``. ``on_added(weight)`` is called whenever a product has been added to it. While ``holding`` is
    a list, products are put there instead and run by :meth:`run`: the weight part of a backward pass that is split in
    two (zero-bubble pipelines, Qi et al., arXiv 2401.10241).
    """

    def __init__(
        self, on_added: Callable[[torch.Tensor], None], total: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        self.on_added = on_added
        self.total = total or _main_grad
        self.holding: list[Callable[[], None]] | None = None
        self.products = 0
        """LinearKernels computed so far."""

    def add(self, weight: torch.Tensor, add_to: Callable[[torch.Tensor], None]) -> None:
        """``add_to(total)``, now or later, with the weight's total as [out, in]."""

        def product() -> None:
            add_to(self.total(weight).view(-1, weight.shape[-1]))
            self.products += 1
            self.on_added(weight)

        if self.holding is None:
            product()
        else:
            self.holding.append(product)

    @staticmethod
    @torch.no_grad()
    def run(held: list[Callable[[], None]]) -> None:
        """Compute what was held back; the list is empty afterwards."""
        for product in held:
            product()
        held.clear()


class _Linear(torch.autograd.Function):
    """x Wᵀ + b on the entry of a tensor-parallel region.

    The collective of the input's gradient (and, under sequence parallelism, the one that gathers the input once more,
    so that the gathered one need not be kept) runs while the weight's gradient is computed.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, group: Group, sequence: bool, products: LinearKernels,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        # Not saved tensors: every micro-batch changes main_grad between a forward and its backward.
        ctx.save_for_backward(x, *weights)
        ctx.weights, ctx.group, ctx.sequence, ctx.products = weights, group, sequence, products
        whole = all_gather_first(x, group) if sequence else x
        matrices = [weight.flatten(0, -2) for weight in weights]
        ctx.sizes = [matrix.shape[0] for matrix in matrices]
        biases = [None] * len(weights) if bias is None else [bias] if len(weights) == 1 else bias.split(ctx.sizes)
        made = [products.forward(whole, w, matrix, b) for w, matrix, b in zip(weights, matrices, biases)]
        ctx.known = [known for _, known in made]
        return made[0][0] if len(made) == 1 else torch.cat([y for y, _ in made], dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        products, wanted = ctx.products, ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        parts = [rows] if len(weights) == 1 else [part.contiguous() for part in rows.split(ctx.sizes, dim=1)]
        gathered = start_all_gather(x, ctx.group) if ctx.sequence and any(wanted[5:]) else None
        dx = None
        made = [products.gradient(part) for part in parts]
        if wanted[0]:
            wide = None
            for (for_input, _), weight, matrix in zip(made, ctx.weights, weights):
                one = products.dgrad(for_input, weight, matrix.flatten(0, -2))
                wide = one if wide is None else wide.add_(one)
            assert wide is not None
            wide = wide.view(*grad.shape[:-1], x.shape[-1])
            dx = start_reduce_scatter(wide, ctx.group) if ctx.sequence else start_all_reduce(wide, ctx.group)
        for_weights = [for_weight for _, for_weight in made]
        del made, parts  # a weight's gradient may be held back, and holds what it takes itself
        dw: list[torch.Tensor | None] = [None] * len(weights)
        if any(wanted[5:]):
            whole = (gathered.take() if gathered is not None else x).reshape(-1, x.shape[-1])
            for i, weight in enumerate(ctx.weights):
                if wanted[5 + i]:
                    dw[i] = _weight_gradient(products, weight, for_weights[i], whole, ctx.known[i])
        db = rows.sum(dim=0) if wanted[1] else None
        return None if dx is None else dx.take(), db, None, None, None, *dw


def _weight_gradient(
    products: LinearKernels, weight: torch.Tensor, rows: Any, x: torch.Tensor, known: torch.Tensor | None
) -> torch.Tensor | None:
    """Add a weight's gradient to the sum that is kept of it, now or later; where there is none, return it."""
    gradients: WgradAccumulator | None = getattr(weight, "weight_gradients", None)
    main_grad = getattr(weight, "main_grad", None)
    if gradients is not None:
        gradients.add(weight, lambda total: products.wgrad_accumulate(total, rows, x, known))
    elif main_grad is not None:
        products.wgrad_accumulate(main_grad.view(-1, weight.shape[-1]), rows, x, known)
    else:
        return products.wgrad(rows, x, known).view(weight.shape)
    return None


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, shared: torch.Tensor | None = None,
    group: Group = None, sequence_parallel: bool = False, products: LinearKernels = PLAIN,
) -> torch.Tensor:
    """x Wᵀ + b: x [..., in], weight [..., in] whose leading dimensions are the outputs, bias [out] → [..., out].

    With ``group`` it is also the entry of a tensor-parallel region, where every rank uses all of x and the gradients of
    x are summed; under ``sequence_parallel`` x is this rank's tokens [seq/tp, ...] and is gathered.

    Where ``weight`` has a contiguous ``main_grad`` of its shape, in float32 or wider, the backward pass adds the
    weight's gradient to that and autograd gets none for it (other uses of the weight keep theirs);
    ``weight_gradients`` (:class:`WgradAccumulator`) says where to instead, and when.

    ``shared``: a second weight [..., in], whose outputs follow those of ``weight``; ``bias`` has both.

    ``products``: how the three matrix products are computed. In 8 bits those are rounded and scaled on each rank by
    itself; collectives, biases and their gradients stay in the dtype.
    """
    kept = weight.requires_grad and (hasattr(weight, "main_grad") or hasattr(weight, "weight_gradients"))
    if products is PLAIN and not kept and group is None and shared is None and not widens(x):
        return PLAIN.forward(x, weight, weight.flatten(0, -2), bias)[0]
    weights = (weight,) if shared is None else (weight, shared)
    out: torch.Tensor = _Linear.apply(x, bias, group, sequence_parallel and group is not None, products, *weights)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True)
class Rows:
    """Rows [start, start + count) of a logical matrix, of which ``copies`` neighbouring tp ranks hold the same."""

    start: int
    count: int
    copies: int = 1

    def parameter(
        self, name: str, shape: tuple[int, ...], init: InitSpec, dtype: torch.dtype, device: torch.device
    ) -> nn.Parameter:
        """These rows of the parameter of logical ``shape``, with their record."""
        local, offset = (self.count, *shape[1:]), (self.start, *(0 for _ in shape[1:]))
        shared = self.copies > 1
        record = ParameterRecord(
            name, shape, local, offset, local, (Shard(0, ("kv_heads",) if shared else ("tp",)),), init,
            decay=len(shape) > 1, partial_over=(*REPLICAS, "kv_copies") if shared else REPLICAS,
        )
        return attach(nn.Parameter(torch.empty(local, dtype=dtype, device=device)), record)


class ColumnParallelLinear(nn.Module):
    """y = x Wᵀ + b with W's rows split: [seq(/tp), batch, in] → [seq, batch, packed * out/tp].

    ``packed`` > 1 keeps that many matrices of ``out_features`` rows in one
    parameter of logical shape (packed, out, in), each split by its own rows, so
    that one matrix product serves them all (SwiGLU's gate and up projections).
    ``skip_bias``: b is a parameter that the caller adds, fused with what follows.
    ``rows``: this rank's own rows and those that it shares with neighbours, in place of an equal split; two parameters
    of one name, and an output [seq, batch, own rows + shared rows].
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        ctx: ParallelContext,
        sequence_parallel: bool,
        bias: bool,
        init: InitSpec,
        packed: int = 1,
        skip_bias: bool = False,
        rows: tuple[Rows, Rows] | None = None,
        dtype: torch.dtype = torch.float32,
        products: LinearKernels = PLAIN,
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel, self.skip_bias = ctx.over("tp"), sequence_parallel, skip_bias
        self.products = products
        self.bias: nn.Parameter | None = None
        self.shared_weight: nn.Parameter | None = None
        self.shared_bias: nn.Parameter | None = None
        if rows is not None:
            self.weight, self.shared_weight = (
                r.parameter(f"{name}.weight", (out_features, in_features), init, dtype, ctx.device) for r in rows
            )
            if bias:
                zeros = InitSpec("zeros")
                self.bias, self.shared_bias = (
                    r.parameter(f"{name}.bias", (out_features,), zeros, dtype, ctx.device) for r in rows
                )
            return
        lead = (packed,) if packed > 1 else ()
        shards = (Shard(len(lead), ("tp",)),)
        record = make_record(
            f"{name}.weight", (*lead, out_features, in_features), ctx, init=init, decay=True, shards=shards
        )
        self.weight = attach(nn.Parameter(torch.empty(record.local_shape, dtype=dtype, device=ctx.device)), record)
        if bias:
            record = make_record(
                f"{name}.bias", (*lead, out_features), ctx, init=InitSpec("zeros"), decay=False, shards=shards
            )
            self.bias = attach(nn.Parameter(torch.empty(record.local_shape, dtype=dtype, device=ctx.device)), record)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias.flatten() if self.bias is not None and not self.skip_bias else None
        if bias is not None and self.shared_bias is not None:
            bias = torch.cat([bias, self.shared_bias])
        return linear(
            x, self.weight, bias, shared=self.shared_weight, group=self.group,
            sequence_parallel=self.sequence_parallel, products=self.products,
        )


class RowParallelLinear(nn.Module):
    """y = x Wᵀ + b with W's columns split: [seq, batch, in/tp] → [seq(/tp), batch, out].

    The bias is whole on every rank and added once, after the sum. Under
    sequence parallelism each rank adds it to its own tokens, so its gradient is
    partial and the record says so. ``skip_bias``: the caller adds it, with the residual.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        ctx: ParallelContext,
        sequence_parallel: bool,
        bias: bool,
        init: InitSpec,
        skip_bias: bool = False,
        dtype: torch.dtype = torch.float32,
        products: LinearKernels = PLAIN,
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel, self.skip_bias = ctx.over("tp"), sequence_parallel, skip_bias
        self.products = products
        record = make_record(
            f"{name}.weight", (out_features, in_features), ctx, init=init, decay=True, shards=(Shard(1, ("tp",)),),
        )
        self.weight = attach(nn.Parameter(torch.empty(record.local_shape, dtype=dtype, device=ctx.device)), record)
        self.bias: nn.Parameter | None = None
        if bias:
            record = make_record(
                f"{name}.bias", (out_features,), ctx, init=InitSpec("zeros"), decay=False,
                partial_over=SEQUENCE if sequence_parallel else REPLICAS,
            )
            self.bias = attach(nn.Parameter(torch.empty(record.local_shape, dtype=dtype, device=ctx.device)), record)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = linear(x, self.weight, products=self.products)
        y = (reduce_scatter_sequence if self.sequence_parallel else reduce_from_tp)(y, self.group)
        return y if self.bias is None or self.skip_bias else y + self.bias
