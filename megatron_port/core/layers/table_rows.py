"""Gradients of looked-up rows added to a table's sum, in torch ops and without a gradient of the whole table."""

from __future__ import annotations

from torch import Tensor


def torch_add_rows(total: Tensor, tokens: Tensor, rows: Tensor) -> None:
    """Add rows [n, h] to the rows of ``total`` [table rows, h] that tokens int64 [n] name, in its dtype.

    In one order: index_add_ has none on a GPU, where index_put_ sorts.
    """
    if total.device.type == "cpu":
        total.index_add_(0, tokens, rows.to(total.dtype))
    else:
        total.index_put_((tokens,), rows.to(total.dtype), accumulate=True)
