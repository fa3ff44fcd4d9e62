"""Which positions of a sequence a rank holds, as runs of neighbouring positions. Pure arithmetic; no processes.

Everything that depends on a token's position asks here: learned and rotary embeddings, dropout masks, the loader's
slices of tokens, labels and masks, and the shape of what passes between stages. A rank holds two sets:

* the *held* positions, whose tokens and labels it reads and whose queries, keys and values it computes;
* the *residual* positions, its rows of the residual stream: under sequence parallelism one of the equal pieces into
  which the tensor-parallel ranks divide the held ones, otherwise all of them.

Today a rank holds the whole sequence. A division of the sequence for attention is another list of chunks in
:func:`sequence_partition`, and nothing else: every user copes with several runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from megatron_port.parallel.mesh import Mesh


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

    def piece(self, index: int, pieces: int) -> Positions:
        """Return piece ``index`` of equal pieces, in row order. Raises ValueError where they would not be equal."""
        size, left = divmod(self.count, pieces)
        if left:
            raise ValueError(f"{self.count} positions do not divide into {pieces} equal pieces")
        first, last, passed, runs = index * size, (index + 1) * size, 0, []
        for run in self.runs:
            begin, end = max(first - passed, 0), min(last - passed, run.length)
            if begin < end:
                runs.append(Run(run.start + begin, end - begin))
            passed += run.length
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
class SequencePartition:
    """How a sequence is divided between the ranks of a replica's stage, seen from one of them.

    The sequence is cut into ``chunks`` equal chunks, of which this rank holds those numbered ``held`` (ascending). Its
    residual stream is piece ``piece`` of ``pieces`` of what it holds.

    Raises:
        ValueError: a chunk or a piece that does not exist.
    """

    chunks: int = 1
    held_chunks: tuple[int, ...] = (0,)
    piece: int = 0
    pieces: int = 1

    def __post_init__(self) -> None:
        held = self.held_chunks
        if not held or sorted(set(held)) != list(held) or held[0] < 0 or held[-1] >= self.chunks:
            raise ValueError(f"chunks {held} of {self.chunks}: name each once, in ascending order, from 0")
        if not 0 <= self.piece < self.pieces:
            raise ValueError(f"piece {self.piece} of {self.pieces}")

    def held(self, seq_length: int) -> Positions:
        """Positions whose tokens, labels, queries, keys and values this rank holds."""
        return _held(self, seq_length)

    def residual(self, seq_length: int) -> Positions:
        """Positions of this rank's rows of the residual stream."""
        return _residual(self, seq_length)

    def seq_length(self, held_rows: int) -> int:
        """Return the length of a sequence of which this rank holds ``held_rows`` positions."""
        return held_rows * self.chunks // len(self.held_chunks)


@lru_cache(maxsize=256)
def _held(partition: SequencePartition, seq_length: int) -> Positions:
    size, left = divmod(seq_length, partition.chunks)
    if left:
        raise ValueError(f"a sequence of {seq_length} tokens does not divide into {partition.chunks} equal chunks")
    runs: list[Run] = []
    for chunk in partition.held_chunks:
        start = chunk * size
        if runs and sum(runs[-1]) == start:
            runs[-1] = Run(runs[-1].start, runs[-1].length + size)
        else:
            runs.append(Run(start, size))
    return Positions(tuple(runs))


@lru_cache(maxsize=256)
def _residual(partition: SequencePartition, seq_length: int) -> Positions:
    return _held(partition, seq_length).piece(partition.piece, partition.pieces)


WHOLE_SEQUENCE = SequencePartition()
"""A rank that holds every position."""


def sequence_partition(mesh: Mesh, rank: int, *, sequence_parallel: bool = False) -> SequencePartition:
    """Return the partition of a layout for one of its ranks.

    ``sequence_parallel``: tensor-parallel ranks divide the residual stream between them; what the rank *holds*, all
    that a loader needs, does not depend on it.
    """
    if not sequence_parallel:
        return WHOLE_SEQUENCE
    tensor = mesh.factors("tp")
    return SequencePartition(piece=mesh.index(rank, tensor), pieces=mesh.size(tensor))
