"""Linear layers split over tensor-parallel ranks (Shoeybi et al., arXiv 1909.08053).

``ColumnParallelLinear`` splits the output features, ``RowParallelLinear`` the
input features; between the two nothing is communicated. With sequence
parallelism (Korthikanti et al., arXiv 2205.05198) the region's entry gathers
the sequence and its exit reduce-scatters it, in place of the two all-reduces.

``linear`` adds a weight's gradient directly to the engine's fp32 sum instead of
materializing one in the weight's own dtype, rounding it and adding it. At the
entry of a region it overlaps the collective of dgrad with wgrad.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from megatron_port.core.dist.collectives import (
    Group,
    all_gather_first,
    reduce_from_tp,
    reduce_scatter_sequence,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    widening_addmm,
)
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import REPLICAS
from megatron_port.core.dist.record import SEQUENCE, InitSpec, ParameterRecord, Shard, attach, make_record
from megatron_port.core.layers import fused
from megatron_port.core.layers.fused import FirstOrderFunction, add_bias, first_order, gradient_dtype, widens

if TYPE_CHECKING:
    from megatron_port.core.layers.spec import LinearSpec


# Gradients of looked-up rows added to a table's sum, in torch ops and without a gradient of the whole table.

def torch_add_rows(total: Tensor, tokens: Tensor, rows: Tensor) -> None:
    """Add rows [n, h] to the rows of ``total`` [table rows, h] that tokens int64 [n] name, in its dtype.

    In one order: index_add_ has none on a GPU, where index_put_ sorts.
    """
    if total.device.type == "cpu":
        total.index_add_(0, tokens, rows.to(total.dtype))
    else:
        total.index_put_((tokens,), rows.to(total.dtype), accumulate=True)


# The three matrix products of a linear layer: forward y = x Wᵀ, dgrad dx = dy W and wgrad dW = dyᵀ x.

def add_product(main_grad: Tensor, a: Tensor, b: Tensor, *, first: bool = False, scale: float = 1.0) -> None:
    """Add ``scale`` aᵀ b to ``main_grad`` [n, m], in its dtype; a [k, n], b [k, m] have the same or a narrower dtype.

    ``first``: write it over what ``main_grad`` holds, which is not read.
    """
    if main_grad.dtype == torch.float32 != a.dtype and widening_addmm(a.device, a.dtype):
        mm, addmm = _WIDENING
        if scale != 1.0:
            add_to_sum(main_grad, mm(a.t(), b, out_dtype=torch.float32).mul_(scale), first)
        elif first:
            mm(a.t(), b, out_dtype=torch.float32, out=main_grad)
        else:
            addmm(main_grad, a.t(), b, out_dtype=torch.float32, out=main_grad)
        return
    if a.dtype != main_grad.dtype and a.device.type != "cpu":
        product = a.t().mm(b)
        add_to_sum(main_grad, product if scale == 1.0 else product.to(main_grad.dtype).mul_(scale), first)
        return
    # On a CPU in the sum's dtype: no product to round, and none to add in a pass of its own.
    left, right = a.t().to(main_grad.dtype), b.to(main_grad.dtype)
    if first:
        torch.mm(left, right, out=main_grad)
        if scale != 1.0:
            main_grad.mul_(scale)
    else:
        main_grad.addmm_(left, right, alpha=scale)


_WIDENING: tuple[Any, Any] = (torch.mm, torch.addmm)
"""Both also take ``out_dtype``, which their types do not know."""


def add_to_sum(main_grad: Tensor, product: Tensor, first: bool) -> None:
    """Add a product to a sum of gradients; ``first``: write it over what the sum holds."""
    if first:
        main_grad.copy_(product)
    else:
        main_grad.add_(product)


class LinearKernels(Protocol):
    """The products of one linear layer. ``weight_2d`` [out, in] is a view of the parameter ``weight``."""

    def forward(
        self, x: Tensor, weight: Tensor, weight_2d: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return y = x Wᵀ + b [..., out] for x [..., in], and the scale of x for ``wgrad`` (None: it needs none)."""

    def prepare_grad_output(self, grad_output_2d: Tensor) -> tuple[Any, Any]:
        """Return the output gradient [tokens, out] twice: prepared for ``dgrad``, and for ``wgrad``."""

    def dgrad(self, grad_output_2d: Any, weight: Tensor, weight_2d: Tensor) -> Tensor:
        """Gradient of the input, dx = dy W [tokens, in]."""

    def wgrad(self, grad_output_2d: Any, x: Tensor, saved_input_scale: Tensor | None) -> Tensor:
        """Gradient of the weight, dW = dyᵀ x [out, in], in the dtype of x [tokens, in]."""

    def wgrad_accumulate(
        self, main_grad: Tensor, grad_output_2d: Any, x: Tensor, saved_input_scale: Tensor | None, *,
        first: bool = False,
    ) -> None:
        """Add the gradient of the weight to ``main_grad`` [out, in] (float32 or wider) without rounding it first.

        ``first``: ``main_grad`` holds nothing, and the gradient is written over it.
        """


class PlainLinearKernels:
    """Products in the dtype of the operands."""

    def forward(
        self, x: Tensor, weight: Tensor, weight_2d: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return fused.linear(x, weight_2d, bias), None

    def prepare_grad_output(self, grad_output_2d: Tensor) -> tuple[Tensor, Tensor]:
        return grad_output_2d, grad_output_2d

    def dgrad(self, grad_output_2d: Tensor, weight: Tensor, weight_2d: Tensor) -> Tensor:
        return fused.product(grad_output_2d, weight_2d)

    def wgrad(self, grad_output_2d: Tensor, x: Tensor, saved_input_scale: Tensor | None) -> Tensor:
        return fused.product(grad_output_2d.t(), x)

    def wgrad_accumulate(
        self, main_grad: Tensor, grad_output_2d: Tensor, x: Tensor, saved_input_scale: Tensor | None, *,
        first: bool = False,
    ) -> None:
        add_product(main_grad, grad_output_2d, x, first=first)


PLAIN = PlainLinearKernels()


class WeightCopies(Protocol):
    """A step's copies of the weights in another format, each made once."""

    def attach(self, weight: Tensor) -> None:
        """Let the products with a weight find these copies."""

    def active(self, *, backward: bool = True) -> AbstractContextManager[None]:
        """Keep copies until the context ends, in which nobody changes a weight. ``backward``: of dgrad too."""


class NarrowProducts(Protocol):
    """A run's products in 8 bits (``kernels.fp8.Fp8``)."""

    def linear_kernels(self) -> LinearKernels:
        """Return the kernels of the model's linear layers."""

    def weight_copies(self) -> WeightCopies:
        """Return where the copies of a model's weights are kept, which may be none yet."""


__all__ = [
    "ColumnParallelLinear", "Linear", "LinearContext", "RowParallelLinear", "Rows", "UnsplitLinear", "WgradAccumulator",
    "add_product", "linear",
]


class WgradAccumulator:
    """Adds weight gradients to an engine's sums, at once or deferred; weights carry it as ``wgrad_accumulator``.

    ``main_grad_of(weight)`` returns the sum to add to, contiguous, of the weight's shape, in float32 or wider, when the
    product runs. ``uninitialized_of(weight)`` returns the same while it is uninitialized: the first product of a step
    is then written over it, and nobody has to clear it. ``on_added(weight)`` is called after each product added to it.
    While ``deferred`` is a list, products are appended to it and computed later by :meth:`flush`: the weight part of a
    backward pass split in two (zero-bubble pipelines, Qi et al., arXiv 2401.10241). ``add_rows(main_grad, tokens,
    rows)`` adds the gradients of looked-up rows to a table's sum.
    """

    def __init__(
        self, on_added: Callable[[torch.Tensor], None], main_grad_of: Callable[[torch.Tensor], torch.Tensor],
        uninitialized_of: Callable[[torch.Tensor], torch.Tensor | None] = lambda weight: None,
        add_rows: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] = torch_add_rows,
    ) -> None:
        self.on_added, self.main_grad_of, self.uninitialized_of = on_added, main_grad_of, uninitialized_of
        self.add_rows = add_rows
        self.deferred: list[Callable[[], None]] | None = None
        self.computed = 0
        """Products computed so far."""
        self.beside = 0
        """Products computed while rows were in transit between experts' ranks."""
        self._filling: list[Callable[[], None]] = []
        self._exchanges = 0

    def add(
        self, weight: torch.Tensor, add_to: Callable[..., None], *operands: Any, overwrites: bool = False,
        **settings: Any,
    ) -> None:
        """Call ``add_to(main_grad, *operands, **settings)``, now or deferred, with the weight's sum as [out, in].

        ``overwrites``: it takes ``first=True`` too, and then writes over whatever the sum holds.
        """
        if self.deferred is None:
            self._compute(weight, add_to, overwrites, *operands, **settings)
        else:
            self.deferred.append(partial(self._compute, weight, add_to, overwrites, *operands, **settings))

    def _compute(
        self, weight: torch.Tensor, add_to: Callable[..., None], overwrites: bool, *operands: Any, **settings: Any
    ) -> None:
        uninitialized = self.uninitialized_of(weight) if overwrites else None
        if uninitialized is None:
            add_to(_as_2d(self.main_grad_of(weight)), *operands, **settings)
        else:
            add_to(_as_2d(uninitialized), *operands, **settings, first=True)
        self.computed += 1
        self.on_added(weight)

    @contextmanager
    def filling(self, deferred: list[Callable[[], None]], exchanges: int) -> Iterator[None]:
        """Compute deferred products in the block, in equal parts, while rows of ``exchanges`` exchanges are on their
        way (:meth:`during_exchange`); those that are left stay in the list."""
        self._filling, self._exchanges = deferred, exchanges
        try:
            yield
        finally:
            self._filling = []

    def during_exchange(self) -> None:
        """Compute the products that are for one exchange; called when it has been started and nothing else is left to
        do before its rows are needed. How many does not depend on how long it takes: all ranks compute the same."""
        if not self._filling:
            return
        share = -(-len(self._filling) // max(self._exchanges, 1))
        self._exchanges -= 1
        now, self._filling[:share] = self._filling[:share], []
        self.beside += len(now)
        self.flush(now)

    @staticmethod
    @torch.no_grad()
    def flush(deferred: list[Callable[[], None]]) -> None:
        """Compute deferred products and empty the list."""
        for product in deferred:
            product()
        deferred.clear()


def _as_2d(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight [..., in] as [out, in], a vector as it is. A view that changes nothing costs 1 µs."""
    return weight if weight.dim() <= 2 else weight.flatten(0, -2)


class _Linear(FirstOrderFunction):
    """y = x Wᵀ + b at the entry of a tensor-parallel region.

    The collective of dgrad (and, under sequence parallelism, the one that gathers the input once more, so that the
    gathered one need not be kept) runs while wgrad is computed.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, group: Group, sequence: bool, kernels: LinearKernels,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        # The weights are also kept as they are: a saved tensor may be unpacked without the parameter's attributes.
        ctx.save_for_backward(x if any(ctx.needs_input_grad[5:]) else None, *weights)
        ctx.weights, ctx.group, ctx.sequence, ctx.kernels = weights, group, sequence, kernels
        ctx.bias = bias
        full_input = all_gather_first(x, group) if sequence else x
        if len(weights) == 1:
            y, scale = kernels.forward(full_input, weights[0], _as_2d(weights[0]), bias)
            ctx.saved_input_scales = (scale,)
            return y
        weights_2d = [_as_2d(weight) for weight in weights]
        ctx.sizes = [weight_2d.shape[0] for weight_2d in weights_2d]
        biases = [None] * len(weights) if bias is None else bias.split(ctx.sizes)
        results = [kernels.forward(full_input, w, w_2d, b) for w, w_2d, b in zip(weights, weights_2d, biases)]
        ctx.saved_input_scales = [scale for _, scale in results]
        return torch.cat([y for y, _ in results], dim=-1)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        if x is not None:
            x = x.detach()  # a deferred wgrad holds it: its graph would keep the chunk's input and that one's gradient
        kernels, needs = ctx.kernels, ctx.needs_input_grad
        grad_2d = grad.flatten(0, -2)
        parts = [grad_2d] if len(weights) == 1 else [part.contiguous() for part in grad_2d.split(ctx.sizes, dim=1)]
        wgrads = any(needs[5:])
        gathered = start_all_gather(x, ctx.group) if ctx.sequence and wgrads else None
        partial_dx: torch.Tensor | None = None
        for_wgrad = []
        for i, weight in enumerate(ctx.weights):
            for_dgrad, second = kernels.prepare_grad_output(parts[i])
            for_wgrad.append(second)
            if needs[0]:
                one = kernels.dgrad(for_dgrad, weight, _as_2d(weights[i]))
                partial_dx = one if partial_dx is None else partial_dx.add_(one)
        del parts, for_dgrad  # a wgrad may be deferred, and holds what it takes itself
        dx = None
        if partial_dx is not None:
            start = start_reduce_scatter if ctx.sequence else start_all_reduce
            dx = start(partial_dx.view(*grad.shape[:-1], partial_dx.shape[-1]), ctx.group)
        dw: list[torch.Tensor | None] = [None] * len(weights)
        if wgrads:
            full_input = (x if gathered is None else gathered.take()).reshape(-1, x.shape[-1])
            for i, weight in enumerate(ctx.weights):
                if needs[5 + i]:
                    dw[i] = _wgrad(kernels, weight, for_wgrad[i], full_input, ctx.saved_input_scales[i])
        db = grad_2d.sum(dim=0, dtype=gradient_dtype(ctx.bias)) if needs[1] else None
        return None if dx is None else dx.take(), db, None, None, None, *dw


def _wgrad(
    kernels: LinearKernels, weight: torch.Tensor, grad_output_2d: Any, x: torch.Tensor,
    saved_input_scale: torch.Tensor | None,
) -> torch.Tensor | None:
    """Give a weight's gradient to its accumulator; return it where the weight has none."""
    accumulator: WgradAccumulator | None = getattr(weight, "wgrad_accumulator", None)
    if accumulator is None:
        return kernels.wgrad(grad_output_2d, x, saved_input_scale).view(weight.shape)
    accumulator.add(weight, kernels.wgrad_accumulate, grad_output_2d, x, saved_input_scale, overwrites=True)
    return None


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, shared: torch.Tensor | None = None,
    group: Group = None, sequence_parallel: bool = False, kernels: LinearKernels = PLAIN,
) -> torch.Tensor:
    """Return x Wᵀ + b [..., out]: x [..., in], weight [..., in] whose leading dimensions are the outputs, bias [out].

    With ``group`` it is also the entry of a tensor-parallel region, where every rank uses all of x and the gradients of
    x are summed; under ``sequence_parallel`` x is this rank's tokens [seq/tp, ...] and is gathered.

    Where ``weight`` has a ``wgrad_accumulator`` (:class:`WgradAccumulator`), the backward pass gives the weight's
    gradient to that and autograd gets none for it (other uses of the weight keep theirs).

    ``shared``: a second weight [..., in], whose outputs follow those of ``weight``; ``bias`` has both.

    ``kernels``: compute the three matrix products. Those in 8 bits are rounded and scaled by each rank on its own;
    collectives, biases and their gradients stay in the compute dtype.
    """
    accumulates = weight.requires_grad and hasattr(weight, "wgrad_accumulator")
    if kernels is PLAIN and not accumulates and group is None and shared is None and not widens(x):
        return PLAIN.forward(x, weight, _as_2d(weight), bias)[0]
    weights = (weight,) if shared is None else (weight, shared)
    out: torch.Tensor = _Linear.apply(x, bias, group, sequence_parallel and group is not None, kernels, *weights)
    return out


@dataclass(frozen=True)
class Rows:
    """Rows [start, start + count) of a logical matrix, held alike by ``copies`` neighbouring tp ranks."""

    start: int
    count: int
    copies: int = 1

    def parameter(
        self, name: str, shape: tuple[int, ...], init: InitSpec, dtype: torch.dtype, device: torch.device,
        row_runs: tuple[int, ...] = (),
    ) -> nn.Parameter:
        """Return a parameter that holds these rows of logical ``shape``, with its record."""
        local, offset = (self.count, *shape[1:]), (self.start, *(0 for _ in shape[1:]))
        shared = self.copies > 1
        record = ParameterRecord(
            name, shape, local, offset, local, (Shard(0, ("kv_heads",) if shared else ("tp",)),), init,
            decay=len(shape) > 1, partial_over=(*REPLICAS, "kv_copies") if shared else REPLICAS,
            row_runs=row_runs if len(shape) > 1 else (),
        )
        return attach(nn.Parameter(torch.empty(local, dtype=dtype, device=device)), record)


@dataclass(frozen=True)
class LinearContext:
    """Groups, dtype and kernels that the linear layers of a stage share."""

    ctx: ParallelContext
    sequence_parallel: bool = False
    """Outside of the regions that tensor-parallel ranks divide, each has a part of the tokens."""
    dtype: torch.dtype = torch.float32
    """Dtype of parameters."""
    kernels: LinearKernels = PLAIN

    def parameter(self, record: ParameterRecord) -> nn.Parameter:
        """Return an uninitialized parameter of the record's local shape, with the record."""
        return attach(nn.Parameter(torch.empty(record.local_shape, dtype=self.dtype, device=self.ctx.device)), record)


class Linear(Protocol):
    """Interface of a linear to the modules of a layer: one matrix, or factors (``weights.low_rank``)."""

    @property
    def bias(self) -> nn.Parameter | None:
        """Its bias: [.., out/tp] where outputs are split, else [out]."""

    def __call__(self, x: torch.Tensor, **options: Any) -> Any: ...


class ColumnParallelLinear(nn.Module):
    """y = x Wᵀ + b with W's rows split: [seq(/tp), batch, in] → [seq, batch, packed * out/tp].

    ``layer``: before the names of its parameters. The spec's ``packed`` > 1 keeps that many matrices of ``outputs``
    rows in one parameter of logical shape (packed, out, in), each split by its own rows, so that one matrix product
    serves them all (SwiGLU's gate and up projections).
    ``rows``: this rank's own rows and those that it shares with neighbours, in place of an equal split; two parameters
    of one name, and an output [seq, batch, own rows + shared rows].
    ``skip_bias``: b is a parameter that the caller adds, fused with what follows.
    """

    def __init__(
        self, layer: str, spec: LinearSpec, context: LinearContext, *, rows: tuple[Rows, Rows] | None = None,
        skip_bias: bool = False,
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel = context.ctx.over("tp"), context.sequence_parallel
        self.kernels, self.skip_bias = context.kernels, skip_bias
        self.adapter: nn.Module | None = None
        self.bias: nn.Parameter | None = None
        self.shared_weight: nn.Parameter | None = None
        self.shared_bias: nn.Parameter | None = None
        name, init, zeros = f"{layer}.{spec.name}", InitSpec("normal", spec.std), InitSpec("zeros")
        if rows is not None:
            dtype, device, shape = context.dtype, context.ctx.device, (spec.outputs, spec.inputs)
            self.weight, self.shared_weight = (
                r.parameter(f"{name}.weight", shape, init, dtype, device, spec.row_runs) for r in rows
            )
            if spec.bias:
                self.bias, self.shared_bias = (
                    r.parameter(f"{name}.bias", shape[:1], zeros, dtype, device) for r in rows
                )
            return
        lead = (spec.packed,) if spec.packed > 1 else ()
        shards = (Shard(len(lead), ("tp",)),)
        self.weight = context.parameter(make_record(
            f"{name}.weight", (*lead, spec.outputs, spec.inputs), context.ctx, init=init, decay=True, shards=shards,
            row_runs=spec.row_runs,
        ))
        if spec.bias:
            self.bias = context.parameter(make_record(
                f"{name}.bias", (*lead, spec.outputs), context.ctx, init=zeros, decay=False, shards=shards
            ))

    def added_bias(self, detached: bool) -> torch.Tensor | None:
        """Return what the product adds, [.., out/tp]; ``detached``: without a gradient. None: nothing."""
        if self.bias is None or self.skip_bias:
            return None
        bias = self.bias.detach().flatten() if detached else self.bias.flatten()
        return bias if self.shared_bias is None else torch.cat([bias, self.shared_bias])

    def forward(self, x: torch.Tensor, *, detach_bias: bool = False) -> torch.Tensor:
        """Return y. ``detach_bias``: b gets no gradient from here; the caller computes it."""
        bias = self.added_bias(detach_bias)
        if self.adapter is not None:
            weights = (self.weight,) if self.shared_weight is None else (self.weight, self.shared_weight)
            out: torch.Tensor = self.adapter(
                x, weights, bias, group=self.group, sequence=self.sequence_parallel, kernels=self.kernels
            )
            return out
        return linear(
            x, self.weight, bias, shared=self.shared_weight, group=self.group,
            sequence_parallel=self.sequence_parallel, kernels=self.kernels,
        )


class RowParallelLinear(nn.Module):
    """y = x Wᵀ + b with W's columns split: [seq, batch, in/tp] → [seq(/tp), batch, out].

    The bias is whole on every rank and added once, after the sum. Under
    sequence parallelism each rank adds it to its own tokens, so its gradient is
    partial over tp (``partial_over`` in the record). ``skip_bias``: the caller adds it, with the residual.
    """

    def __init__(self, layer: str, spec: LinearSpec, context: LinearContext, *, skip_bias: bool = False) -> None:
        super().__init__()
        self.group, self.sequence_parallel = context.ctx.over("tp"), context.sequence_parallel
        self.kernels, self.skip_bias = context.kernels, skip_bias
        self.adapter: nn.Module | None = None
        self.bias: nn.Parameter | None = None
        name = f"{layer}.{spec.name}"
        self.weight = context.parameter(make_record(
            f"{name}.weight", (spec.outputs, spec.inputs), context.ctx, init=InitSpec("normal", spec.std), decay=True,
            shards=(Shard(1, ("tp",)),),
        ))
        if spec.bias:
            self.bias = context.parameter(make_record(
                f"{name}.bias", (spec.outputs,), context.ctx, init=InitSpec("zeros"), decay=False,
                partial_over=SEQUENCE if self.sequence_parallel else REPLICAS,
            ))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.adapter is not None:
            y = self.adapter(x, (self.weight,), None, group=None, sequence=False, kernels=self.kernels)
        else:
            y = linear(x, self.weight, kernels=self.kernels)
        y = (reduce_scatter_sequence if self.sequence_parallel else reduce_from_tp)(y, self.group)
        return y if self.bias is None or self.skip_bias else add_bias(y, self.bias)


class UnsplitLinear(nn.Module):
    """A product that is not split: [seq(/tp), batch, in] → [seq(/tp), batch, out]. The caller adds its ``bias``."""

    def __init__(self, layer: str, spec: LinearSpec, context: LinearContext) -> None:
        super().__init__()
        self.kernels = context.kernels
        self.adapter: nn.Module | None = None
        self.bias: nn.Parameter | None = None
        name, over = f"{layer}.{spec.name}", SEQUENCE if context.sequence_parallel else REPLICAS
        self.weight = context.parameter(make_record(
            f"{name}.weight", (spec.outputs, spec.inputs), context.ctx, init=InitSpec("normal", spec.std), decay=True,
            partial_over=over, row_runs=spec.row_runs,
        ))
        if spec.bias:
            self.bias = context.parameter(make_record(
                f"{name}.bias", (spec.outputs,), context.ctx, init=InitSpec("zeros"), decay=False, partial_over=over,
            ))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.adapter is not None:
            out: torch.Tensor = self.adapter(x, (self.weight,), None, group=None, sequence=False, kernels=self.kernels)
            return out
        return linear(x, self.weight, kernels=self.kernels)
