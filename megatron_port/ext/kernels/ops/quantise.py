"""Matrices in 8 bits with scales that are powers of two: what ``kernels.fp8`` does with torch's ops, in fewer passes.

float32 and bf16 matrices; both e4m3 and e5m2, of either kind. No gradients: ``layers.linear`` asks for 8-bit
matrices inside the linears' own passes. Bytes an element of bf16: a tensor 5 as it is or transposed, 6 for both, 2 less
where the scale is known; rows 3; columns 5.
"""

from __future__ import annotations

import torch
from torch import Tensor


def tensor(
    x: Tensor, dtype: torch.dtype, *, known: Tensor | None = None, values: bool = True, transposed: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Contiguous x [rows, columns] with one scale: (values, their transpose, inverse of the scale float32 [1, 1]).

    ``known``: the inverse where it is known; then the one returned is empty, as is what is not asked for.
    """
    out: tuple[Tensor, Tensor, Tensor] = torch.ops.megatron_port.fp8_tensor.default(
        x, known, dtype, values, transposed
    )
    return out


def rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Contiguous x [rows, columns] with a scale for each row: (values, inverses float32 [rows, 1])."""
    out: tuple[Tensor, Tensor] = torch.ops.megatron_port.fp8_rows.default(x, dtype)
    return out


def columns(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """xᵀ with a scale for each of its rows, of contiguous x [rows, columns]: (values, inverses [columns, 1])."""
    out: tuple[Tensor, Tensor] = torch.ops.megatron_port.fp8_columns.default(x, dtype)
    return out


def _tensor_shapes(
    x: Tensor, known: Tensor | None, dtype: torch.dtype, values: bool, transposed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    height, width = x.shape
    return (
        x.new_empty((height, width) if values else (0,), dtype=dtype),
        x.new_empty((width, height) if transposed else (0,), dtype=dtype),
        x.new_empty((1, 1) if known is None else (0,), dtype=torch.float32),
    )


def _rows_shapes(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), x.new_empty((x.shape[0], 1), dtype=torch.float32)


def _columns_shapes(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    height, width = x.shape
    return x.new_empty((width, height), dtype=dtype), x.new_empty((width, 1), dtype=torch.float32)


def register_quantise() -> None:
    """Shapes of the ops, in torch's registry."""
    torch.library.register_fake("megatron_port::fp8_tensor", _tensor_shapes)
    torch.library.register_fake("megatron_port::fp8_rows", _rows_shapes)
    torch.library.register_fake("megatron_port::fp8_columns", _columns_shapes)
