"""Evidence by position: what a wrong tensor is where ranks divide the positions of samples between them.

A cell is a block of neighbouring positions of one sample. The reference takes a step with the labels of one cell alone,
for each cell; any mistake in how ranks count labels is a sum of these gradients with weights of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_port.tools.foreign.placement import ranges

AXIS = "cp"
"""Axis of ranks that have other positions of the same samples."""


@dataclass(frozen=True)
class Cell:
    """Labels of a block of positions of a sample."""

    sample: int
    block: int
    labels: int
    """How many there are, never 0."""


@dataclass(frozen=True)
class Division:
    """One way to divide the labels of a step: cells of one share are averaged together."""

    ranks: int
    """That divide positions."""
    blocks: Sequence[Sequence[int]]
    """Those of each rank."""
    samples: int
    """Neighbouring samples in a micro-batch."""
    length: int
    """Positions of a block."""

    def shares(self, cells: Sequence[Cell]) -> list[tuple[int, int]]:
        """Return (micro-batch, rank) of each cell."""
        owner = {block: rank for rank, blocks in enumerate(self.blocks) for block in blocks}
        return [(cell.sample // self.samples, owner[cell.block]) for cell in cells]

    def own_labels(self, cells: Sequence[Cell]) -> list[int]:
        """Return for each cell how many labels its share has."""
        shares = self.shares(cells)
        counts: dict[tuple[int, int], int] = {}
        for share, cell in zip(shares, cells, strict=True):
            counts[share] = counts.get(share, 0) + cell.labels
        return [counts[share] for share in shares]

    def means(self, cells: Sequence[Cell], values: Tensor) -> Tensor:
        """Return the mean over shares of each one's mean. ``values``: [cells, ...], means over the labels of a cell."""
        own = torch.tensor(self.own_labels(cells), dtype=values.dtype)
        labels = torch.tensor([cell.labels for cell in cells], dtype=values.dtype)
        weights = labels / own / len(set(self.shares(cells)))
        return (weights.reshape(-1, *[1] * (values.dim() - 1)) * values).sum(0)

    @property
    def words(self) -> str:
        """Which positions ranks have."""
        def positions(blocks: Sequence[int]) -> str:
            return ranges([block * self.length + i for block in blocks for i in range(self.length)])

        return "; ".join(f"rank {rank} of {AXIS} {positions(blocks)}" for rank, blocks in enumerate(self.blocks[:4]))


def blocks_of(ranks: int, sequence: int) -> int:
    """Return how many blocks a sample has, so that ranks have whole ones; 0: its positions do not divide."""
    return next((count for count in (2 * ranks, ranks) if ranks > 1 and sequence % count == 0), 0)


def divisions(ranks: int, sequence: int, samples: int) -> Iterator[Division]:
    """Yield what ranks may have: neighbouring positions, or as ring attention balances them, a block of the first half
    and its mirror image; of any number of samples at a time, all of a rank's first."""
    count = blocks_of(ranks, sequence)
    each = count // ranks
    ways = [[list(range(rank * each, rank * each + each)) for rank in range(ranks)]]
    if each == 2:
        ways.append([[rank, count - 1 - rank] for rank in range(ranks)])
    for size in (n for n in range(samples, 0, -1) if samples % n == 0):
        for blocks in ways:
            yield Division(ranks, blocks, size, sequence // count)
