"""Products of 8-bit matrices with scales (Micikevicius et al., arXiv 2209.05433): formats, casts, products, providers.

A matrix is multiplied by a scale and rounded to 8 bits; the product's fp32 sums are divided by the scale. It is the
largest power of two that brings the operand's own largest element (of the tensor, or of each row) within the format's
range; it is computed on the device and nothing waits for it.

*Why powers of two.* Multiplying by one is exact, in bf16 as well, so an element's 8-bit rounding does not depend on the
scale: two ranks that scale pieces of a tensor by their own largest elements round every element as one process does
that scales the whole, unless it is so much smaller than the largest that it falls below the format's
normal numbers (2^-14 of the largest in e4m3, 2^-29 in e5m2). Tensor parallelism therefore needs no collective for
scales. A scale that uses the range to the last binade would buy nothing: the formats are floating-point.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_port.ext.kernels.ops import quantise as own

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


@dataclass(frozen=True)
class Quantised:
    """A matrix in 8 bits: ``values`` [rows, columns] contiguous; ``values`` × ``inverse`` is the matrix."""

    values: Tensor
    inverse: Tensor
    """fp32 powers of two, [1, 1] or, with a scale for each row, [rows, 1]."""
    rowwise: bool

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix."""
        return self.values.shape

    def transposed(self) -> Quantised:
        """The transposed matrix; only with one scale for the tensor."""
        assert not self.rowwise, "scales of rows are not scales of columns"
        return Quantised(self.values.t().contiguous(), self.inverse, False)


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


# Values that few bits can say: the grid on which weights compute while they are trained for it.
#
# A group is ``group_size`` neighbours along the inputs of a row of the logical matrix, and has one scale, in float32.
# For
# b bits the scale is the smallest at which nothing lies beyond [-2^(b-1), 2^(b-1) - 1]: torchao's
# ``SYMMETRIC_NO_CLIPPING_ERR``, so that post-training quantisation of what was trained gives the weights that it was
# trained with. As nothing is clipped, the straight-through gradient (Bengio et al., arXiv 1308.3432) is the identity.

BITS = {"int8": 8, "int4": 4}


def on_grid(weight: torch.Tensor, kind: str, group_size: int) -> torch.Tensor:
    """Return a matrix [rows, inputs] with each element at the nearest value that ``kind`` can say, in its dtype.

    ``kind``: int8 | int4 | binary. ``group_size`` divides the inputs.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    groups = weight.detach().to(wide).unflatten(-1, (-1, group_size))
    if kind == "binary":
        size = groups.abs().mean(dim=-1, keepdim=True)
        found = torch.where(groups < 0, -size, size)
    else:
        most = 1 << BITS[kind] - 1
        low, high = groups.amin(dim=-1, keepdim=True), groups.amax(dim=-1, keepdim=True)
        scale = torch.maximum(low / -most, high / (most - 1)).clamp_(min=torch.finfo(wide).tiny)
        found = (groups * (1.0 / scale)).round_().clamp_(-most, most - 1).mul_(scale)
    return found.flatten(-2).to(weight.dtype)
