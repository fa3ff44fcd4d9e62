"""The three matrix products of a linear, y = x Wᵀ, dx = dy W, dW = dyᵀ x: in the dtype, or in 8 bits (precision.fp8).

``tensorwise`` has one scale for a tensor: inputs and weights in e4m3, gradients, which spread wider, in e5m2; all three
products in 8 bits. ``rowwise`` has a scale for each row of the left and each column of the right operand, all in e4m3,
and dW, whose sum over tokens feels single large ones most, stays in bf16. Both leave sums in fp32. The recipes are
torchao's ``tensorwise`` and ``rowwise_with_gw_hp``, but for scales: powers of two here (``backend.fp8`` says why).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_port.backend import cpu_upcast
from megatron_port.backend.fp8 import Fp8, Quantised
from megatron_port.parallel.compat import widening_addmm


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += aᵀ b in the dtype of ``total``: [n, m], a [k, n], b [k, m] of the same or a narrower dtype."""
    if a.dtype == total.dtype:
        total.addmm_(a.t(), b)
    elif total.dtype == torch.float32 and widening_addmm(a.device, a.dtype):
        addmm: Any = torch.addmm
        addmm(total, a.t(), b, out_dtype=torch.float32, out=total)
    elif a.device.type == "cpu":  # no product to round, and none to add in a pass of its own
        total.addmm_(a.t().to(total.dtype), b.to(total.dtype))
    else:
        total.add_(a.t().mm(b))


class QuantizedWeightCache:
    """What an engine puts on its weights as ``quantized_weight_cache``: what is made of a weight is made once a step.

    Only while :meth:`kept` is open, during which the engine changes no weight.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, str], Quantised] | None = None
        self._backward = False

    @contextmanager
    def kept(self, *, backward: bool = True) -> Iterator[None]:
        """Keep copies from here on, and drop them at the end. ``backward``: input gradients will be asked for."""
        self._made, self._backward = {}, backward
        try:
            yield
        finally:
            self._made = None

    def get(self, weight: Tensor, name: str, make: Callable[[], Quantised]) -> Quantised:
        """The copy of a weight by a name, made where there is none."""
        if self._made is None:
            return make()
        key = (id(weight), name)
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def pair(
        self, weight: Tensor, which: str, one: Callable[[], Quantised], both: Callable[[], tuple[Quantised, Quantised]]
    ) -> Quantised:
        """``which`` of a weight's "rows" and "columns": made together where both are going to be used."""
        if self._made is None or not self._backward:
            return self.get(weight, which, one)
        if (id(weight), which) not in self._made:
            self._made[id(weight), "rows"], self._made[id(weight), "columns"] = both()
        return self._made[id(weight), which]

    def bytes_held(self) -> int:
        """Of all copies, without their scales."""
        return sum(copy.values.numel() for copy in (self._made or {}).values())


class LinearKernels(Protocol):
    """The products of one linear. ``matrix`` [out, in]; ``weight``: the parameter that it is a view of."""

    def forward(self, x: Tensor, weight: Tensor, matrix: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x [..., in] → (x Wᵀ + b [..., out], what the weight's gradient needs to know of x)."""

    def gradient(self, rows: Tensor) -> tuple[Any, Any]:
        """Of the output's gradient [tokens, out]: what the input's gradient takes, and what the weight's takes."""

    def dgrad(self, rows: Any, weight: Tensor, matrix: Tensor) -> Tensor:
        """[tokens, in]."""

    def wgrad(self, rows: Any, x: Tensor, known: Tensor | None) -> Tensor:
        """[out, in] in the dtype of x [tokens, in]; ``known``: from ``forward``."""

    def wgrad_accumulate(self, total: Tensor, rows: Any, x: Tensor, known: Tensor | None) -> None:
        """total [out, in], float32 or wider, += the weight's gradient, not rounded to a narrower dtype before."""


class PlainLinearKernels:
    """In the dtype of the operands."""

    def forward(self, x: Tensor, weight: Tensor, matrix: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See :class:`LinearKernels`."""
        return cpu_upcast.linear(x, matrix, bias), None

    def gradient(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`LinearKernels`."""
        return rows, rows

    def dgrad(self, rows: Tensor, weight: Tensor, matrix: Tensor) -> Tensor:
        """See :class:`LinearKernels`."""
        return cpu_upcast.product(rows, matrix)

    def wgrad(self, rows: Tensor, x: Tensor, known: Tensor | None) -> Tensor:
        """See :class:`LinearKernels`."""
        return cpu_upcast.product(rows.t(), x)

    def wgrad_accumulate(self, total: Tensor, rows: Tensor, x: Tensor, known: Tensor | None) -> None:
        """See :class:`LinearKernels`."""
        add_product(total, rows, x)


PLAIN = PlainLinearKernels()


def _copy(weight: Tensor, name: str, make: Callable[[], Quantised]) -> Quantised:
    copies: QuantizedWeightCache | None = getattr(weight, "quantized_weight_cache", None)
    return make() if copies is None else copies.get(weight, name, make)


@dataclass(frozen=True)
class TensorwiseLinearKernels:
    """One scale a tensor; the input's is kept from the forward pass, so it is not searched for again."""

    fp8: Fp8

    def forward(self, x: Tensor, weight: Tensor, matrix: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See :class:`LinearKernels`."""
        left = self.fp8.quantiser.tensor(x.reshape(-1, x.shape[-1]), self.fp8.formats.precise)
        y = self.fp8.product(left, self._weight(weight, matrix, "rows"), bias, x.dtype, True)
        return y.view(*x.shape[:-1], matrix.shape[0]), left.inverse

    def _weight(self, weight: Tensor, matrix: Tensor, which: str) -> Quantised:
        q, dtype = self.fp8.quantiser, self.fp8.formats.precise
        one = partial(q.tensor if which == "rows" else q.transposed, matrix, dtype)
        copies: QuantizedWeightCache | None = getattr(weight, "quantized_weight_cache", None)
        return one() if copies is None else copies.pair(weight, which, one, partial(q.both, matrix, dtype))

    def gradient(self, rows: Tensor) -> tuple[tuple[Quantised, torch.dtype], Quantised]:
        """See :class:`LinearKernels`."""
        straight, transposed = self.fp8.quantiser.both(rows, self.fp8.formats.wide)
        return (straight, rows.dtype), transposed

    def dgrad(self, rows: tuple[Quantised, torch.dtype], weight: Tensor, matrix: Tensor) -> Tensor:
        """See :class:`LinearKernels`."""
        return self.fp8.product(rows[0], self._weight(weight, matrix, "columns"), None, rows[1], False)

    def _gradient(self, rows: Quantised, x: Tensor, inverse: Tensor | None, dtype: torch.dtype) -> Tensor:
        right = self.fp8.quantiser.transposed(x, self.fp8.formats.precise, inverse)
        return self.fp8.product(rows, right, None, dtype, False)

    def wgrad(self, rows: Quantised, x: Tensor, known: Tensor | None) -> Tensor:
        """See :class:`LinearKernels`."""
        return self._gradient(rows, x, known, x.dtype)

    def wgrad_accumulate(self, total: Tensor, rows: Quantised, x: Tensor, known: Tensor | None) -> None:
        """See :class:`LinearKernels`."""
        total.add_(self._gradient(rows, x, known, torch.float32))


@dataclass(frozen=True)
class RowwiseLinearKernels:
    """A scale for each row of the left operand and each column of the right one; weight gradients in the dtype."""

    fp8: Fp8

    def forward(self, x: Tensor, weight: Tensor, matrix: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See :class:`LinearKernels`."""
        q, dtype = self.fp8.quantiser, self.fp8.formats.precise
        left = q.rows(x.reshape(-1, x.shape[-1]), dtype)
        right = _copy(weight, "rows", lambda: q.rows(matrix, dtype))
        y = self.fp8.product(left, right, bias, x.dtype, True)
        return y.view(*x.shape[:-1], matrix.shape[0]), None

    def gradient(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`LinearKernels`."""
        return rows, rows

    def dgrad(self, rows: Tensor, weight: Tensor, matrix: Tensor) -> Tensor:
        """See :class:`LinearKernels`."""
        q, dtype = self.fp8.quantiser, self.fp8.formats.precise
        right = _copy(weight, "columns", lambda: q.columns(matrix, dtype))
        return self.fp8.product(q.rows(rows, dtype), right, None, rows.dtype, True)

    def wgrad(self, rows: Tensor, x: Tensor, known: Tensor | None) -> Tensor:
        """See :class:`LinearKernels`."""
        return cpu_upcast.product(rows.t(), x)

    def wgrad_accumulate(self, total: Tensor, rows: Tensor, x: Tensor, known: Tensor | None) -> None:
        """See :class:`LinearKernels`."""
        add_product(total, rows, x)


def make_linear_kernels(fp8: Fp8 | None) -> LinearKernels:
    """The products of a run's layers."""
    if fp8 is None:
        return PLAIN
    return TensorwiseLinearKernels(fp8) if fp8.recipe == "tensorwise" else RowwiseLinearKernels(fp8)
