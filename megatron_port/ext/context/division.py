"""How context-parallel ranks divide the positions of a sequence, in equal chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from megatron_port.core.dist.positions import Positions, Run


@dataclass(frozen=True)
class ChunkDivision:
    """The ``positions.Division`` of a sequence by chunks.

    The sequence is cut into ``chunks`` equal chunks; ``by_rank``: the numbers of those that each rank holds, ascending,
    as many on each.

    Raises:
        ValueError: a chunk that is not held, is held twice or does not exist, or ranks that hold more than others.
    """

    chunks: int
    by_rank: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        held = [chunk for ranks in self.by_rank for chunk in ranks]
        if sorted(held) != list(range(self.chunks)) or any(sorted(ranks) != list(ranks) for ranks in self.by_rank):
            raise ValueError(f"chunks {self.by_rank} of {self.chunks}: name each once, each rank's in ascending order")
        if len({len(ranks) for ranks in self.by_rank}) > 1:
            raise ValueError(f"chunks {self.by_rank}: every rank must hold as many")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Made once: divisions by documents have hundreds of chunks, and every layer looks one up."""
        return hash((self.chunks, self.by_rank))

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.by_rank)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The chunks in the order in which the ranks hold them, one rank's after another's."""
        return tuple(chunk for ranks in self.by_rank for chunk in ranks)

    @cached_property
    def to_ranks(self) -> tuple[Run, ...]:
        """Runs of chunks of the sequence that, one after another, are what the ranks hold."""
        return _merged(self.order)

    @cached_property
    def to_sequence(self) -> tuple[Run, ...]:
        """Runs of chunks of what the ranks hold that, one after another, are the sequence."""
        return _merged(sorted(range(self.chunks), key=self.order.__getitem__))

    @property
    def in_order(self) -> bool:
        """Whether the ranks' positions, one rank's after another's, are those of the sequence."""
        return len(self.to_ranks) == 1

    def held(self, rank: int, seq_length: int) -> Positions:
        """Return the positions that a rank holds. ValueError: the sequence does not divide into the chunks."""
        size, left = divmod(seq_length, self.chunks)
        if left:
            raise ValueError(f"a sequence of {seq_length} tokens does not divide into {self.chunks} equal chunks")
        return Positions(tuple(Run(run.start * size, run.length * size) for run in _merged(self.by_rank[rank])))

    def in_sequence(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of all positions in the sequence's order from those of the ranks, one rank's after another's:
        [seq, ...] → same."""
        return rows if self.in_order else _rearranged(rows, self.chunks, self.to_sequence)

    def in_ranks(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of the ranks, one rank's after another's, from those in the sequence's order."""
        return rows if self.in_order else _rearranged(rows, self.chunks, self.to_ranks)


def _merged(numbers: Sequence[int]) -> tuple[Run, ...]:
    """Return the runs that these numbers are, in their order."""
    runs: list[Run] = []
    for number in numbers:
        if runs and sum(runs[-1]) == number:
            runs[-1] = Run(runs[-1].start, runs[-1].length + 1)
        else:
            runs.append(Run(number, 1))
    return tuple(runs)


def _rearranged(x: torch.Tensor, chunks: int, runs: tuple[Run, ...]) -> torch.Tensor:
    rows = x.shape[0] // chunks
    return torch.cat([x.narrow(0, run.start * rows, run.length * rows) for run in runs])


@lru_cache(maxsize=256)
def divide(ranks: int, order: str) -> ChunkDivision:
    """Return the division over ``ranks``, more than one, that is the same for every micro-batch.

    ``order``: contiguous, one chunk on each rank; zigzag, an early and a late one, so that causal attention costs every
    rank the same (the i-th and the i-th from the end); balanced, which is zigzag where a sample is one document.
    """
    if order == "contiguous":
        return ChunkDivision(ranks, tuple((i,) for i in range(ranks)))
    return ChunkDivision(2 * ranks, tuple((i, 2 * ranks - 1 - i) for i in range(ranks)))
