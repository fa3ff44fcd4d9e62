"""Which positions of a sequence a rank holds, as runs of neighbouring positions. Pure arithmetic; no processes.

Everything that depends on a token's position asks here: learned and rotary embeddings, dropout masks, the loader's
slices of tokens, labels and masks, and the shape of what passes between stages. A rank holds two sets:

* the *held* positions, whose tokens and labels it reads and whose queries, keys and values it computes;
* the *residual* positions, its rows of the residual stream: under sequence parallelism one of the equal pieces into
  which the tensor-parallel ranks divide the held ones, otherwise all of them.

Context-parallel ranks hold chunks of the sequence (:class:`Division`), which need not be neighbours: every user copes
with several runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

from megatron_port.core.dist.mesh import Mesh


class Run(NamedTuple):
    """The positions ``start`` to ``start + length - 1``."""

    start: int
    length: int


@dataclass(frozen=True)
class Positions:
    """Positions of a tensor's rows, in row order, as runs. Adjacent runs should be merged."""

    runs: tuple[Run, ...]

    @classmethod
    def contiguous(cls, length: int, start: int = 0) -> Positions:
        """``length`` positions from ``start``."""
        return cls((Run(start, length),))

    @property
    def count(self) -> int:
        """Number of positions."""
        return sum(run.length for run in self.runs)

    @property
    def stop(self) -> int:
        """Largest position plus one."""
        return max(run.start + run.length for run in self.runs)

    @property
    def first_rows(self) -> list[int]:
        """The row of the first position of each run."""
        return [0, *accumulate(run.length for run in self.runs)][:-1]

    def piece(self, index: int, pieces: int) -> Positions:
        """Return piece ``index`` of equal pieces, in row order. Raises ValueError where they would not be equal."""
        size, left = divmod(self.count, pieces)
        if left:
            raise ValueError(f"{self.count} positions do not divide into {pieces} equal pieces")
        return self.rows(index * size, size)

    def rows(self, first: int, count: int) -> Positions:
        """Return the positions of ``count`` rows from ``first`` on."""
        runs = []
        for run, row in zip(self.runs, self.first_rows, strict=True):
            begin, end = max(first - row, 0), min(first + count - row, run.length)
            if begin < end:
                runs.append(Run(run.start + begin, end - begin))
        return Positions(tuple(runs))

    def take(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Select these positions from ``x``, which has an entry per position along ``dim``. A single run is a view,
        and all of ``x`` is ``x`` itself: the gradient of a slice would be copied into zeros.

        Raises:
            RuntimeError: ``x`` is too short.
        """
        if self.runs == ((0, x.shape[dim]),):
            return x
        parts = [x.narrow(dim, run.start, run.length) for run in self.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def index(self, device: torch.device) -> torch.Tensor:
        """Return the positions, int64 [count]."""
        parts = [torch.arange(s, s + n, dtype=torch.int64, device=device) for s, n in self.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True)
class Division:
    """How the positions of a sequence are divided between the context-parallel ranks of a replica.

    The sequence is cut into ``chunks`` equal chunks; ``by_rank``: the numbers of those that each rank holds, ascending,
    as many on each.

    Raises:
        ValueError: a chunk that is not held, is held twice or does not exist, or ranks that hold more than others.
    """

    chunks: int = 1
    by_rank: tuple[tuple[int, ...], ...] = ((0,),)

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


def _merged(numbers: Sequence[int]) -> tuple[Run, ...]:
    """Return the runs that these numbers are, in their order."""
    runs: list[Run] = []
    for number in numbers:
        if runs and sum(runs[-1]) == number:
            runs[-1] = Run(runs[-1].start, runs[-1].length + 1)
        else:
            runs.append(Run(number, 1))
    return tuple(runs)


WHOLE = Division()
"""One rank that holds every position."""


@lru_cache(maxsize=256)
def divide(ranks: int, order: str) -> Division:
    """Return the division that is the same for every micro-batch.

    ``order``: contiguous, one chunk on each rank; zigzag, an early and a late one, so that causal attention costs every
    rank the same (the i-th and the i-th from the end); balanced, which is zigzag where a sample is one document.
    """
    if ranks == 1:
        return WHOLE
    if order == "contiguous":
        return Division(ranks, tuple((i,) for i in range(ranks)))
    return Division(2 * ranks, tuple((i, 2 * ranks - 1 - i) for i in range(ranks)))


@dataclass(frozen=True)
class SequencePartition:
    """How a sequence is divided between the ranks of a replica's stage, seen from one of them.

    Between the context-parallel ranks as ``division`` says, of which this one is ``rank``. Its residual stream is piece
    ``piece`` of ``pieces`` of what it holds.

    Raises:
        ValueError: a rank or a piece that does not exist.
    """

    division: Division = WHOLE
    rank: int = 0
    piece: int = 0
    pieces: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.division.ranks:
            raise ValueError(f"rank {self.rank} of {self.division.ranks}")
        if not 0 <= self.piece < self.pieces:
            raise ValueError(f"piece {self.piece} of {self.pieces}")

    @property
    def chunks(self) -> int:
        """Chunks of the sequence."""
        return self.division.chunks

    @property
    def held_chunks(self) -> tuple[int, ...]:
        """Chunks of the sequence that this rank holds."""
        return self.division.by_rank[self.rank]

    def divided(self, division: Division | None) -> SequencePartition:
        """Return the partition of a micro-batch whose sequences are divided in another way (None: as ever)."""
        return self if division is None else _divided(self, division)

    def held(self, seq_length: int) -> Positions:
        """Positions whose tokens, labels, queries, keys and values this rank holds."""
        return _held(self, seq_length)

    def residual(self, seq_length: int) -> Positions:
        """Positions of this rank's rows of the residual stream."""
        return _residual(self, seq_length)

    def seq_length(self, held_rows: int) -> int:
        """Return the length of a sequence of which this rank holds ``held_rows`` positions."""
        return held_rows * self.division.ranks


@lru_cache(maxsize=256)
def _divided(partition: SequencePartition, division: Division) -> SequencePartition:
    return replace(partition, division=division)


@lru_cache(maxsize=256)
def _held(partition: SequencePartition, seq_length: int) -> Positions:
    size, left = divmod(seq_length, partition.chunks)
    if left:
        raise ValueError(f"a sequence of {seq_length} tokens does not divide into {partition.chunks} equal chunks")
    return Positions(tuple(Run(run.start * size, run.length * size) for run in _merged(partition.held_chunks)))


@lru_cache(maxsize=256)
def _residual(partition: SequencePartition, seq_length: int) -> Positions:
    return _held(partition, seq_length).piece(partition.piece, partition.pieces)


WHOLE_SEQUENCE = SequencePartition()
"""A rank that holds every position."""


def sequence_partition(
    mesh: Mesh, rank: int, *, order: str = "zigzag", sequence_parallel: bool = False
) -> SequencePartition:
    """Return the partition of a layout for one of its ranks.

    ``order``: ``layout.cp_order``; ``sequence_parallel``: tensor-parallel ranks divide the residual stream between
    them; what the rank *holds*, all that a loader needs, does not depend on it.
    """
    tensor, context = mesh.factors("tp"), mesh.factors("cp")
    piece, pieces = (mesh.index(rank, tensor), mesh.size(tensor)) if sequence_parallel else (0, 1)
    return SequencePartition(divide(mesh.size(context), order), mesh.index(rank, context), piece, pieces)
