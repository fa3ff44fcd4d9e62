"""Gradients of looked-up rows added to a table's sum: no gradient of the whole table is made.

fp32, fp16 and bf16 rows; the sum is fp32. The rows of a token are added up in one order, without atomics: the same bits
again on every device. Bytes: each gradient once, each row of the table that is named in and out; a sort of the tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def add_rows_(total: Tensor, tokens: Tensor, rows: Tensor) -> None:
    """Add rows [n, h] to the rows of ``total`` [table rows, h], float32, that tokens int64 [n] name."""
    ids, order = torch.sort(tokens, stable=True)
    torch.ops.megatron_port.add_rows_(total, rows.contiguous(), order, ids)


def _nothing(total: Tensor, rows: Tensor, order: Tensor, ids: Tensor) -> None:
    return None


def register_table_rows() -> None:
    """Shapes of the op, in torch's registry; it has no gradient."""
    torch.library.register_fake("megatron_port::add_rows_", _nothing)
