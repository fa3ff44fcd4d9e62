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

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import ClassVar, NamedTuple, Protocol

import torch

from megatron_port.core.dist.mesh import Mesh
from megatron_port.core.registry import PARTS


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


class Division(Protocol):
    """How the positions of a sequence are divided between the context-parallel ranks of a replica, as many to each."""

    def __hash__(self) -> int: ...

    @property
    def ranks(self) -> int:
        """Number of ranks."""

    @property
    def chunks(self) -> int:
        """Equal chunks that a sequence is cut into: its length is a multiple of them."""

    def held(self, rank: int, seq_length: int) -> Positions:
        """Return the positions that a rank holds. ValueError: the sequence does not divide into the chunks."""

    def in_sequence(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of all positions in the sequence's order from those of the ranks, one rank's after another's:
        [seq, ...] → same."""

    def in_ranks(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of the ranks, one rank's after another's, from those in the sequence's order."""


@dataclass(frozen=True)
class Undivided:
    """The division of one rank, which holds every position."""

    ranks: ClassVar[int] = 1
    chunks: ClassVar[int] = 1

    def held(self, rank: int, seq_length: int) -> Positions:
        """Return all positions."""
        return Positions.contiguous(seq_length)

    def in_sequence(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows as they are."""
        return rows

    def in_ranks(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows as they are."""
        return rows


WHOLE = Undivided()
"""One rank that holds every position."""


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
    return partition.division.held(partition.rank, seq_length)


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
    tensor, context = mesh.dims("tp"), mesh.dims("cp")
    piece, pieces = (mesh.index(rank, tensor), mesh.size(tensor)) if sequence_parallel else (0, 1)
    ranks = mesh.size(context)
    division: Division = WHOLE if ranks == 1 else PARTS.function("context-parallel division")(ranks, order)
    return SequencePartition(division, mesh.index(rank, context), piece, pieces)
