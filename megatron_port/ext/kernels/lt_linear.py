"""Products of linear layers by cublasLt or hipBLASLt, where an algorithm was chosen for their form; others by torch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_port.core.layers.linear import PLAIN, PlainLinearKernels
from megatron_port.ext.kernels.lt_products import Epilogue, product
from megatron_port.ext.kernels.products_table import Form

ALIGNMENT = 16
"""Bytes: of operands that are less aligned the library may name other algorithms, of which none was chosen."""


def aligned(x: Tensor) -> bool:
    """Return whether a tensor begins at a multiple of :data:`ALIGNMENT` bytes."""
    return x.data_ptr() % ALIGNMENT == 0


class LtLinearKernels(PlainLinearKernels):
    """Forward with its bias, dgrad, and wgrad added to its float32 sum by the product itself.

    Args:
        chosen: candidate (``lt_products``) by form. The same on every rank: algorithms add in different orders.
        dtype: of the operands.
    """

    def __init__(self, chosen: Mapping[Form, int], dtype: torch.dtype) -> None:
        self.chosen, self.dtype = dict(chosen), dtype

    def forward(
        self, x: Tensor, weight: Tensor, weight_2d: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        outputs, inputs = weight_2d.shape
        rows = x.numel() // inputs
        kind, epilogue = ("forward", Epilogue.PLAIN) if bias is None else ("forward+bias", Epilogue.BIAS)
        operands = (x, weight_2d) if bias is None else (x, weight_2d, bias)
        candidate = self._candidate(kind, rows, outputs, inputs, *operands)
        if candidate is None:
            return PLAIN.forward(x, weight, weight_2d, bias)
        y = x.new_empty(*x.shape[:-1], outputs)
        product(x.view(rows, inputs), weight_2d.t(), y.view(rows, outputs), candidate=candidate, epilogue=epilogue,
                vector=bias)
        return y, None

    def dgrad(self, grad_output_2d: Tensor, weight: Tensor, weight_2d: Tensor) -> Tensor:
        (rows, inner), columns = grad_output_2d.shape, weight_2d.shape[1]
        candidate = self._candidate("dgrad", rows, columns, inner, grad_output_2d, weight_2d)
        if candidate is None:
            return PLAIN.dgrad(grad_output_2d, weight, weight_2d)
        dx = grad_output_2d.new_empty(rows, columns)
        product(grad_output_2d, weight_2d, dx, candidate=candidate)
        return dx

    def wgrad_accumulate(
        self, main_grad: Tensor, grad_output_2d: Tensor, x: Tensor, saved_input_scale: Tensor | None, *,
        first: bool = False,
    ) -> None:
        (inner, rows), columns = grad_output_2d.shape, x.shape[1]
        candidate = self._candidate("wgrad", rows, columns, inner, grad_output_2d, x)
        if candidate is None or main_grad.dtype != torch.float32 or not aligned(main_grad):
            PLAIN.wgrad_accumulate(main_grad, grad_output_2d, x, saved_input_scale, first=first)
        else:
            product(grad_output_2d.t(), x, main_grad, adds=not first, candidate=candidate)

    def _candidate(self, kind: str, rows: int, columns: int, inner: int, *operands: Tensor) -> int | None:
        """Return the algorithm that was chosen for a form; None: torch's product serves it."""
        found = self.chosen.get((kind, rows, columns, inner))  # type: ignore[call-overload]  # a Form is this tuple
        if found is None or not all(t.dtype == self.dtype and t.is_contiguous() and aligned(t) for t in operands):
            return None
        return int(found)
