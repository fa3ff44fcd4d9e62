"""Products of 8-bit matrices with scales (Micikevicius et al., arXiv 2209.05433): formats, casts, products, providers.

A matrix is multiplied by a scale and rounded to 8 bits; the product's fp32 sums are divided by the scale. It is the
largest power of two that brings the operand's own largest element (of the tensor, or of each row) within the format's
range; it is computed on the device and nothing waits for it.

The ``tensorwise`` recipe has one scale per tensor: inputs and weights are e4m3, gradients, whose values spread wider,
e5m2, and all three products of a linear layer run in 8 bits. The ``rowwise`` recipe has one scale for each row of the
left and each column of the right operand, all in e4m3; its wgrad, whose sum over tokens suffers most from single large
values, stays in bf16. Both accumulate in fp32. The recipes are torchao's ``tensorwise`` and ``rowwise_with_gw_hp``,
except that scales are powers of two.

*Why powers of two.* Multiplying by one is exact, in bf16 as well, so an element's 8-bit rounding does not depend on the
scale: two ranks that scale pieces of a tensor by their own largest elements round every element as one process does
that scales the whole, unless it is so much smaller than the largest that it falls below the format's
normal numbers (2^-14 of the largest in e4m3, 2^-29 in e5m2). Tensor parallelism therefore needs no collective for
scales. A scale that uses the range to the last binade would buy nothing: the formats are floating-point.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_port.core.layers.fused import product
from megatron_port.core.layers.linear import LinearKernels, add_product, add_to_sum
from megatron_port.ext.kernels.ops import quantise as own
from megatron_port.ext.kernels.quantised import Quantised, QuantizedWeightCache

_EXPONENT_BITS = 0x7F80_0000
"""Exponent bits of a float32."""
_SMALLEST = 2.0**-100
"""Stands for the largest element of a tensor of zeros; the scale stays finite."""


@dataclass(frozen=True)
class Formats:
    """The 8-bit formats of a device."""

    precise: torch.dtype
    """4 exponent bits, 3 mantissa bits: activations, weights, gradients with a scale for each row."""
    wide: torch.dtype
    """5 and 2: gradients with one scale for the tensor."""


OCP = Formats(torch.float8_e4m3fn, torch.float8_e5m2)
"""NVIDIA's, AMD's from gfx950 on, the CPU's."""
FNUZ = Formats(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
"""gfx942 (MI300): without infinities and negative zero."""


ScaledMM = Callable[[Quantised, Quantised, Tensor | None, torch.dtype, bool], Tensor]
"""(a [m, k], b [n, k], bias [n] or None, dtype of the result, fast) → a bᵀ + bias, summed in fp32. Both scaled alike.
``fast``: Hopper's tensor cores may keep their own sums, of fewer bits than fp32."""


class Quantiser(Protocol):
    """Casts of x [rows, columns], float32 or bf16, to an 8-bit dtype: the same bits by every provider (of a NaN, not
    its sign; beside one, e4m3fn's largest number is NaN in torch 2.11).

    ``inverse``: that of an earlier cast of the same x, whose largest element is then not searched for.
    """

    def tensor(self, x: Tensor, dtype: torch.dtype, inverse: Tensor | None = None) -> Quantised:
        """Cast x with one scale."""

    def transposed(self, x: Tensor, dtype: torch.dtype, inverse: Tensor | None = None) -> Quantised:
        """Cast xᵀ with one scale."""

    def both(self, x: Tensor, dtype: torch.dtype) -> tuple[Quantised, Quantised]:
        """Cast x and xᵀ with one scale."""

    def rows(self, x: Tensor, dtype: torch.dtype) -> Quantised:
        """Cast x with a scale per row."""

    def columns(self, x: Tensor, dtype: torch.dtype) -> Quantised:
        """Cast xᵀ with a scale per row of xᵀ."""


def scale_of(x: Tensor, dtype: torch.dtype, dim: int | None = None) -> Tensor:
    """Return the fp32 scale of a matrix, [1, 1], or of each line along ``dim``, kept as a dimension of size 1.

    An infinite or NaN element makes the scale 0 or infinite, and every product with that element NaN: faults stay
    visible.
    """
    largest = torch.linalg.vector_norm(x, float("inf"), dim=dim, keepdim=True, dtype=torch.float32)
    # A number over a tensor would be multiplied by the tensor's reciprocal, which is subnormal above 2^126.
    wanted = torch.tensor(torch.finfo(dtype).max, dtype=torch.float32) / largest.clamp_min_(_SMALLEST)
    out: Tensor = wanted.view(torch.int32).bitwise_and_(_EXPONENT_BITS).view(torch.float32)  # 2^floor(log2 wanted)
    return out


def _cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    # A scalar tensor, or one of x's dtype, leaves the product in x's dtype, where it is exact.
    factor = scale.reshape(()) if scale.numel() == 1 else scale.to(x.dtype)
    return (x * factor).to(dtype)


def quantise(x: Tensor, dtype: torch.dtype, *, rowwise: bool = False, scale: Tensor | None = None) -> Quantised:
    """Cast x [rows, columns], float32 or bf16, to 8 bits. ``scale``: from :func:`scale_of`; None: computed here."""
    if scale is None:
        scale = scale_of(x, dtype, 1 if rowwise else None)
    return Quantised(_cast(x, scale, dtype).contiguous(), scale.reciprocal(), rowwise)


def quantise_columns(x: Tensor, dtype: torch.dtype) -> Quantised:
    """Cast xᵀ, from x [rows, columns], with a scale per row of xᵀ; transposed after the cast."""
    scale = scale_of(x, dtype, 0)
    return Quantised(_cast(x, scale, dtype).t().contiguous(), scale.reciprocal().reshape(-1, 1), True)


class TorchQuantiser:
    """Casts in torch ops, with a pass over memory for each (:class:`Quantiser`)."""

    def tensor(self, x: Tensor, dtype: torch.dtype, inverse: Tensor | None = None) -> Quantised:
        return quantise(x, dtype, scale=None if inverse is None else inverse.reciprocal())

    def transposed(self, x: Tensor, dtype: torch.dtype, inverse: Tensor | None = None) -> Quantised:
        return self.tensor(x, dtype, inverse).transposed()

    def both(self, x: Tensor, dtype: torch.dtype) -> tuple[Quantised, Quantised]:
        found = self.tensor(x, dtype)
        return found, found.transposed()

    def rows(self, x: Tensor, dtype: torch.dtype) -> Quantised:
        return quantise(x, dtype, rowwise=True)

    def columns(self, x: Tensor, dtype: torch.dtype) -> Quantised:
        return quantise_columns(x, dtype)


class OwnQuantiser:
    """Casts through ``backend.ops``, both copies from one read (:class:`Quantiser`); ``kernels.load`` must have run."""

    def tensor(self, x: Tensor, dtype: torch.dtype, inverse: Tensor | None = None) -> Quantised:
        values, _, found = own.tensor(x.contiguous(), dtype, known=inverse)
        return Quantised(values, found if inverse is None else inverse, False)

    def transposed(self, x: Tensor, dtype: torch.dtype, inverse: Tensor | None = None) -> Quantised:
        _, turned, found = own.tensor(x.contiguous(), dtype, known=inverse, values=False, transposed=True)
        return Quantised(turned, found if inverse is None else inverse, False)

    def both(self, x: Tensor, dtype: torch.dtype) -> tuple[Quantised, Quantised]:
        values, turned, inverse = own.tensor(x.contiguous(), dtype, transposed=True)
        return Quantised(values, inverse, False), Quantised(turned, inverse, False)

    def rows(self, x: Tensor, dtype: torch.dtype) -> Quantised:
        return Quantised(*own.rows(x.contiguous(), dtype), True)

    def columns(self, x: Tensor, dtype: torch.dtype) -> Quantised:
        return Quantised(*own.columns(x.contiguous(), dtype), True)


torch_quantiser: Quantiser = TorchQuantiser()
own_quantiser: Quantiser = OwnQuantiser()


@dataclass(frozen=True)
class Fp8:
    """Recipe, formats and providers of a run's 8-bit products."""

    recipe: str
    """tensorwise | rowwise"""
    formats: Formats
    product: ScaledMM
    quantiser: Quantiser = torch_quantiser

    def linear_kernels(self) -> LinearKernels:
        """Return the kernels of the model's linear layers (``layers.linear``)."""
        return TensorwiseLinearKernels(self) if self.recipe == "tensorwise" else RowwiseLinearKernels(self)

    def weight_copies(self) -> QuantizedWeightCache:
        """Return a cache of the copies of a model's weights."""
        return QuantizedWeightCache()


def torch_scaled_mm(a: Quantised, b: Quantised, bias: Tensor | None, dtype: torch.dtype, fast: bool) -> Tensor:
    """Multiply with torch's kernels (:data:`ScaledMM`): cuBLASLt, CUTLASS or hipBLASLt; on a CPU in fp32."""
    kind = F.ScalingType.RowWise if a.rowwise else F.ScalingType.TensorWise
    right = b.inverse.reshape(1, -1)  # a view whose last stride is 1, which torch wants
    return F.scaled_mm(
        a.values, b.values.t(), a.inverse, kind, right, kind, bias=bias, output_dtype=dtype, use_fast_accum=fast
    )


def reference_scaled_mm(a: Quantised, b: Quantised, bias: Tensor | None, dtype: torch.dtype, fast: bool) -> Tensor:
    """Multiply in fp32 on any device (:data:`ScaledMM`); for tests."""
    y = (a.values.float() * a.inverse) @ (b.values.float() * b.inverse).t()
    return (y if bias is None else y + bias.float()).to(dtype)


# The products of linear layers by the two recipes (layers.linear says what they are).

def _cached(weight: Tensor, name: str, make: Callable[[], Quantised]) -> Quantised:
    cache: QuantizedWeightCache | None = getattr(weight, "quantized_weight_cache", None)
    return make() if cache is None else cache.get(weight, name, make)


@dataclass(frozen=True)
class TensorwiseLinearKernels:
    """Products in 8 bits with one scale per tensor; wgrad reuses the input's scale of the forward pass."""

    fp8: Fp8

    def forward(
        self, x: Tensor, weight: Tensor, weight_2d: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        left = self.fp8.quantiser.tensor(x.reshape(-1, x.shape[-1]), self.fp8.formats.precise)
        y = self.fp8.product(left, self._weight(weight, weight_2d, "rows"), bias, x.dtype, True)
        return y.view(*x.shape[:-1], weight_2d.shape[0]), left.inverse

    def _weight(self, weight: Tensor, weight_2d: Tensor, which: str) -> Quantised:
        q, dtype = self.fp8.quantiser, self.fp8.formats.precise
        one = partial(q.tensor if which == "rows" else q.transposed, weight_2d, dtype)
        cache: QuantizedWeightCache | None = getattr(weight, "quantized_weight_cache", None)
        return one() if cache is None else cache.pair(weight, which, one, partial(q.both, weight_2d, dtype))

    def prepare_grad_output(self, grad_output_2d: Tensor) -> tuple[tuple[Quantised, torch.dtype], Quantised]:
        straight, transposed = self.fp8.quantiser.both(grad_output_2d, self.fp8.formats.wide)
        return (straight, grad_output_2d.dtype), transposed

    def dgrad(self, grad_output_2d: tuple[Quantised, torch.dtype], weight: Tensor, weight_2d: Tensor) -> Tensor:
        left, dtype = grad_output_2d
        return self.fp8.product(left, self._weight(weight, weight_2d, "columns"), None, dtype, False)

    def _wgrad(
        self, grad_output_2d: Quantised, x: Tensor, saved_input_scale: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        right = self.fp8.quantiser.transposed(x, self.fp8.formats.precise, saved_input_scale)
        return self.fp8.product(grad_output_2d, right, None, dtype, False)

    def wgrad(self, grad_output_2d: Quantised, x: Tensor, saved_input_scale: Tensor | None) -> Tensor:
        return self._wgrad(grad_output_2d, x, saved_input_scale, x.dtype)

    def wgrad_accumulate(
        self, main_grad: Tensor, grad_output_2d: Quantised, x: Tensor, saved_input_scale: Tensor | None, *,
        first: bool = False,
    ) -> None:
        add_to_sum(main_grad, self._wgrad(grad_output_2d, x, saved_input_scale, torch.float32), first)


@dataclass(frozen=True)
class RowwiseLinearKernels:
    """Products in 8 bits with one scale per row of the left and per column of the right operand; wgrad in bf16."""

    fp8: Fp8

    def forward(
        self, x: Tensor, weight: Tensor, weight_2d: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        q, dtype = self.fp8.quantiser, self.fp8.formats.precise
        left = q.rows(x.reshape(-1, x.shape[-1]), dtype)
        right = _cached(weight, "rows", lambda: q.rows(weight_2d, dtype))
        y = self.fp8.product(left, right, bias, x.dtype, True)
        return y.view(*x.shape[:-1], weight_2d.shape[0]), None

    def prepare_grad_output(self, grad_output_2d: Tensor) -> tuple[Tensor, Tensor]:
        return grad_output_2d, grad_output_2d

    def dgrad(self, grad_output_2d: Tensor, weight: Tensor, weight_2d: Tensor) -> Tensor:
        q, dtype = self.fp8.quantiser, self.fp8.formats.precise
        right = _cached(weight, "columns", lambda: q.columns(weight_2d, dtype))
        return self.fp8.product(q.rows(grad_output_2d, dtype), right, None, grad_output_2d.dtype, True)

    def wgrad(self, grad_output_2d: Tensor, x: Tensor, saved_input_scale: Tensor | None) -> Tensor:
        return product(grad_output_2d.t(), x)

    def wgrad_accumulate(
        self, main_grad: Tensor, grad_output_2d: Tensor, x: Tensor, saved_input_scale: Tensor | None, *,
        first: bool = False,
    ) -> None:
        add_product(main_grad, grad_output_2d, x, first=first)
