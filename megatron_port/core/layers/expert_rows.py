"""Rows of tokens at the places of their experts, in torch ops: copied there, summed back, and the sum's gradients.

Rows of any floating-point dtype; sums in float32, float64 for float64. ``place`` [tokens, k] names the rows of each
token, -1 one that was dropped. Nothing depends on an order that a device chooses: no additions by index.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gather_rows(x: Tensor, source: Tensor) -> Tensor:
    """Return [rows, h] with row r = x[source[r]], of x [tokens, h] and source int64 [rows]."""
    return x.index_select(0, source)


def sum_rows(y: Tensor, place: Tensor, weight: Tensor | None) -> Tensor:
    """Return [tokens, h], of each token the sum of weight[t, j] · y[place[t, j]] in the order of j, rounded once.

    y [rows, h]; place int64 [tokens, k], -1: left out; weight [tokens, k] in the sums' dtype, None: 1.
    """
    total = y.new_zeros((place.shape[0], y.shape[1]), dtype=_wide(y.dtype))
    if not y.shape[0]:
        return total.to(y.dtype)
    for j, rows in enumerate(place.unbind(1)):
        row = y.index_select(0, rows.clamp_min(0)).to(total.dtype)
        if weight is not None:
            row = row * weight[:, j : j + 1]
        total += row.masked_fill((rows < 0).unsqueeze(1), 0.0)
    return total.to(y.dtype)


def sum_rows_backward(grad: Tensor, y: Tensor, place: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (dy [rows, h], dweight [tokens, k]) of the sum's gradient [tokens, h]; place must name each row once."""
    flat, rows = place.reshape(-1), y.shape[0]
    # The last one is that of the dropped; a row that no place names is an index out of range.
    copy = torch.full((rows + 1,), flat.numel(), device=place.device)
    copy[torch.where(flat < 0, rows, flat)] = torch.arange(flat.numel(), device=place.device)
    copy = copy[:rows]
    wide = grad.index_select(0, copy // place.shape[1]).to(_wide(y.dtype))
    dweight = torch.zeros(flat.shape, dtype=wide.dtype, device=y.device)
    dweight[copy] = (wide * y).sum(dim=1)
    dy = wide * weight.reshape(-1).index_select(0, copy).unsqueeze(1)
    return dy.to(y.dtype), dweight.view(place.shape)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
