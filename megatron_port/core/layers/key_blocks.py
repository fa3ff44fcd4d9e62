"""Which of another rank's keys the queries of this one see, in rows of both. Pure arithmetic; no processes.

A rank's keys are runs of positions, in ascending order. What a query sees is one range of positions, hence one range of
these rows; queries that are neighbours see ranges that cover a range as well, and keys outside of it cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_port.core.dist.positions import Positions, Run


class KeyBlock(NamedTuple):
    """Rows of neighbouring queries, and the rows of keys of which each of them sees some or none, and no others."""

    first_query: int
    queries: int
    first_key: int
    keys: int


def rows_below(position: int, keys: Positions) -> int:
    """Return how many of the keys are before a position."""
    return sum(min(max(position - start, 0), length) for start, length in keys.runs)


def key_blocks(
    queries: Positions, keys: Positions, *, window: int = 0, earliest: Callable[[int], int] | None = None,
    longest: int = 0,
) -> list[KeyBlock]:
    """Return what queries see of keys at ``keys`` (ascending), a block for each run of queries that sees any.

    Runs of more than ``longest`` queries (0: any number) are cut: in a block, the first queries are computed with the
    keys of the last.
    ``window``: keys that a query sees at most, 0: any number; ``earliest(i)``: the first position that the query at
    position i may see in some sample, which must not fall with i (None: 0).
    """
    out, row = [], 0
    for start, length in _cut(queries, longest):
        low = max(earliest(start) if earliest else 0, start - window + 1 if window else 0)
        first, last = rows_below(low, keys), rows_below(start + length, keys)
        if first < last:
            out.append(KeyBlock(row, length, first, last - first))
        row += length
    return out


def _cut(positions: Positions, longest: int) -> list[Run]:
    """Return the runs, none longer than ``longest`` (0: any length)."""
    return [
        Run(start + at, min(longest or length, length - at))
        for start, length in positions.runs for at in range(0, length, longest or length)
    ]


def key_ranges(
    queries: Positions, keys: Positions, batch: int, device: torch.device, *, window: int = 0,
    starts: Tensor | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Return ``AttentionMask.first`` (None: 0) and ``end`` for queries and keys at these positions, in rows of keys.

    ``starts``: int32 [batch, seq], the first position of the document of each position of the sequence.
    """
    index = queries.index(device)
    low = None if starts is None else starts[:, index]
    if window:
        reach = (index - (window - 1)).expand(batch, -1)
        low = reach if low is None else torch.maximum(low, reach)
    return None if low is None else _count_below(low, keys), _count_below(index + 1, keys)


def _count_below(position: Tensor, keys: Positions) -> Tensor:
    """:func:`rows_below` of each position: int32, contiguous."""
    counts = [(position - start).clamp(0, length) for start, length in keys.runs]
    return sum(counts[1:], start=counts[0]).to(torch.int32).contiguous()
