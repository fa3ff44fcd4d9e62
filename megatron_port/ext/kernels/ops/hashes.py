"""Hashes of a tensor's bits by rows of ``core.dist.row_hashes.ROW`` words, in one launch.

Bytes: each word is read once and 8 bytes a row are written; torch's ops, which widen the words first, move nine times
as many.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_port.core.dist.row_hashes import ROW, RowHashes, row_factors


def row_hashes_(out: Tensor, words: Tensor, factors: Tensor) -> None:
    """Write the sum of ``words · factors`` modulo 2^64 of each row to ``out``, as ``core.dist.row_hashes`` does.

    Args:
        out: int64, one for each row; the last row may be shorter.
        words: int32, int16 or int8 [n], contiguous.
        factors: int64 [ROW].

    Raises:
        RuntimeError: a wrong dtype, device or number of elements.
    """
    torch.ops.megatron_port.row_hashes_(out, words, factors)


class OwnRowHashes(RowHashes):
    """The hashes of ``RowHashes``, bit for bit, in one launch per tensor and without widened words."""

    def __init__(self, device: torch.device) -> None:
        self.factors = row_factors(device)

    def of_words(self, words: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the hashes of rows of :meth:`words`."""
        if out is None:
            out = torch.empty(-(-words.numel() // ROW), dtype=torch.int64, device=words.device)
        row_hashes_(out, words, self.factors)
        return out


def _nothing(out: Tensor, words: Tensor, factors: Tensor) -> None:
    return None


def register_row_hashes() -> None:
    """Shapes of the op, in torch's registry; it has no gradient."""
    torch.library.register_fake("megatron_port::row_hashes_", _nothing)
