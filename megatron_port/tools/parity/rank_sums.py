"""Sums over ranks in the order of gloo's ring, on one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def ring_chunk(elements: int, element_size: int, ranks: int) -> int:
    """Return the elements of a chunk of gloo's ring, one chunk per rank: two segments of whole elements."""
    segment_bytes = -(-elements * element_size // (2 * ranks))
    return 2 * -(-segment_bytes // element_size)


def ring_sum(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of the ranks' parts as gloo's ring computes it, rounded after every addition.

    Chunk c starts on the rank before c, goes down the ranks, and ends on c.
    """
    ranks, flat = len(parts), [part.reshape(-1) for part in parts]
    total = torch.empty_like(flat[0])
    size = ring_chunk(total.numel(), total.element_size(), ranks)
    for chunk in range(ranks):
        at = slice(chunk * size, (chunk + 1) * size)
        first, *others = ((chunk - 1 - i) % ranks for i in range(ranks))
        total[at] = flat[first][at]
        for rank in others:
            total[at] += flat[rank][at]
    return total.view_as(parts[0])
