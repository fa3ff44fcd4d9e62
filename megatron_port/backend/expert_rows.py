"""Rows of tokens on their way to experts and back, in plain torch: copied in an order, and summed back.

``source`` [rows] says which token each row is a copy of, ``place`` [tokens, k] where each token's copies are (-1: left
out, because an expert was full). Sums go token by token over its k places, in this order and in float32 (float64 in
float64), and are rounded at the end: no atomic additions, so the same numbers every time.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_port.backend.direct import FirstOrderFunction, first_order


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def gather_rows(x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return the rows [rows, h] of ``x`` [tokens, h] that ``source`` int64 [rows] names."""
    return x.index_select(0, source)


def sum_rows(y: torch.Tensor, place: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """Return the sums [tokens, h] of the rows ``y`` [rows, h] at ``place`` int64 [tokens, k], times ``weight`` float32
    [tokens, k] where it is given."""
    total = y.new_zeros((place.shape[0], y.shape[1]), dtype=_wide(y.dtype))
    if y.shape[0] == 0:
        return total.to(y.dtype)
    for j in range(place.shape[1]):
        there = place[:, j] >= 0
        rows = y.index_select(0, place[:, j].clamp(min=0)).to(total.dtype)
        if weight is not None:
            rows = rows * weight[:, j, None].to(total.dtype)
        total += rows.masked_fill_(~there[:, None], 0)
    return total.to(y.dtype)


def sum_rows_backward(
    grad: torch.Tensor, y: torch.Tensor, place: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of :func:`sum_rows`: of the rows [rows, h], and of the weights [tokens, k]."""
    wide = _wide(y.dtype)
    dy, dweight = torch.zeros_like(y), torch.zeros_like(weight)
    for j in range(place.shape[1]):
        token = (place[:, j] >= 0).nonzero().flatten()
        row, part = place[token, j], grad.index_select(0, token).to(wide)
        dy[row] = (part * weight[token, j, None].to(wide)).to(y.dtype)
        dweight[token, j] = (part * y.index_select(0, row).to(wide)).sum(1).to(weight.dtype)
    return dy, dweight


class _Gathered(FirstOrderFunction):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, source: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(place)
        return gather_rows(x, source)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (place,) = ctx.saved_tensors
        return sum_rows(grad.contiguous(), place, None), None, None


class _Summed(FirstOrderFunction):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, place: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(y, place, weight)
        return sum_rows(y, place, weight)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        y, place, weight = ctx.saved_tensors
        dy, dweight = sum_rows_backward(grad.contiguous(), y, place, weight)
        return dy, None, dweight


def copies(x: torch.Tensor, source: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Return :func:`gather_rows` with its gradient, the sum over each token's ``place``."""
    out: torch.Tensor = _Gathered.apply(x, source, place)
    return out


def combined(y: torch.Tensor, place: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return :func:`sum_rows` with its gradients."""
    out: torch.Tensor = _Summed.apply(y, place, weight)
    return out
