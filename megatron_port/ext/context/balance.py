"""Which blocks of a sequence each context-parallel rank gets, so that all have as many and attention costs them alike.

What attention of a token costs is the number of keys that it sees: with documents those of its own document up to
itself, under a window no more than that, with chunks those of its own. (Without attention a layer's tokens cost alike.)
A division of the sequence that is fixed beforehand fits no micro-batch's documents, so :func:`balanced_chunks` finds
one for each. It is a function of where the documents start and of nothing else: every rank and every stage finds the
same one for itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.ext.context.division import ChunkDivision

LARGEST_BLOCK = 128
"""Positions that stay together: the rows that a kernel of attention reads as one tile."""
GOOD = 1.02
"""Work of the busiest rank, over the mean, at which no fewer neighbours are torn apart for less."""

Sight = tuple[int, int]
"""Window and chunk of a layer's attention, 0 for none."""
Chunks = tuple[tuple[int, ...], ...]
"""The numbers of each rank's chunks, ascending."""


def divisions_by_documents(config: RunConfig, ranks: int) -> Callable[[np.ndarray], ChunkDivision] | None:
    """Return what divides the sequences of a micro-batch, where each has a division of its own by its documents
    (``layout.cp_order``); None: a sample of one document costs zigzag's ranks the same."""
    model = config.model
    if config.layout.cp_order != "balanced" or config.data.attention_documents != "within":
        return None
    spec = model_spec(model)
    mixers = [layer.mixer.attention for layer in (*spec.layers, *(part.layer for part in spec.head.predictions))]
    sights = tuple((attention.window, attention.chunk) for attention in mixers if attention is not None)
    return partial(divided_by_documents, sights, ranks)


def divided_by_documents(sights: Sequence[Sight], ranks: int, starts: np.ndarray) -> ChunkDivision:
    """Return the division of sequences with these document starts, int32 [batch, seq], by the work that they leave."""
    work = attention_work(starts, sights).reshape(-1, block_size(starts.shape[1], ranks)).sum(axis=1)
    return ChunkDivision(len(work), balanced_chunks(work, ranks))


def block_size(seq_length: int, ranks: int) -> int:
    """Return the positions of a block: a divisor of 1/(2 · ranks) of the sequence, so that blocks make up zigzag's
    chunks too, at most :data:`LARGEST_BLOCK`, and where possible no more than 1/(8 · ranks) of the sequence.

    Raises:
        ValueError: the sequence does not divide into 2 · ranks chunks.
    """
    chunk, left = divmod(seq_length, 2 * ranks)
    if left or not chunk:
        raise ValueError(f"a sequence of {seq_length} tokens does not divide into {2 * ranks} equal chunks")
    most = max(min(LARGEST_BLOCK, seq_length // (8 * ranks)), 1)
    return next(size for size in range(most, 0, -1) if chunk % size == 0)


def attention_work(starts: np.ndarray, sights: Sequence[Sight] = ((0, 0),)) -> np.ndarray:
    """Return the keys that the token at each position sees, over samples and layers: int64 [seq].

    ``starts``: int [batch, seq], where in its sample the document of each position starts; ``sights``: of each layer
    that has attention.
    """
    at, total = np.arange(starts.shape[1]), np.zeros(starts.shape[1], dtype=np.int64)
    for (window, chunk), layers in Counter(sights).items():
        seen = at + 1 - (np.maximum(starts, at - at % chunk) if chunk else starts)
        total += layers * (np.minimum(seen, window) if window else seen).sum(0, dtype=np.int64)
    return total


def contiguous_chunks(blocks: int, ranks: int) -> Chunks:
    """Return one run of neighbouring blocks for each rank."""
    each = blocks // ranks
    return tuple(tuple(range(rank * each, (rank + 1) * each)) for rank in range(ranks))


def zigzag_chunks(blocks: int, ranks: int) -> Chunks:
    """Return one early and one late run for each rank: equal work where a sample is one document."""
    half = blocks // (2 * ranks)
    return tuple(
        (*range(rank * half, (rank + 1) * half), *range(blocks - (rank + 1) * half, blocks - rank * half))
        for rank in range(ranks)
    )


def runs_of(chunks: Sequence[int]) -> int:
    """Return how many runs of neighbours these blocks, ascending, are."""
    return 1 + sum(b != a + 1 for a, b in zip(chunks, chunks[1:]))


def imbalance(chunks: Chunks, work: np.ndarray) -> float:
    """Return the work of the busiest rank over the mean. ``work``: of each block."""
    loads = [int(work[list(of_rank)].sum()) for of_rank in chunks]
    return max(loads) * len(loads) / max(sum(loads), 1)


def balanced_chunks(work: np.ndarray, ranks: int) -> Chunks:
    """Return each rank's blocks, as many for each, by the work of the blocks, int64 [blocks].

    Of contiguous, zigzag and cut order the one with the fewest runs whose imbalance is at most :data:`GOOD`; where
    there is none, cut order after exchanges of single blocks.

    Raises:
        ValueError: the blocks do not divide into 2 · ranks.
    """
    if len(work) % (2 * ranks):
        raise ValueError(f"{len(work)} blocks do not divide by twice {ranks} ranks")
    cut = _cut(work, ranks)
    found = [contiguous_chunks(len(work), ranks), zigzag_chunks(len(work), ranks), cut]
    good = [chunks for chunks in found if imbalance(chunks, work) <= GOOD]
    return min(good, key=lambda chunks: sum(map(runs_of, chunks)), default=None) or _exchanged(cut, work)


def _cut(work: np.ndarray, ranks: int) -> Chunks:
    """Give each rank in turn a window of the ring of blocks that are left, the one whose work is nearest its share.

    Windows of that many blocks have the share as their mean, so some are above and some below it, and one comes close
    (necklace splitting: two things can be shared among r ranks with 2 r - 2 cuts).
    """
    each, left, out = len(work) // ranks, np.arange(len(work)), []
    for rest in range(ranks, 1, -1):
        here = np.concatenate((work[left], work[left[: each - 1]]))
        torn = np.concatenate((left, left[: each - 1]))
        sums = _window_sums(here, each)
        breaks = _window_sums((torn[1:] != torn[:-1] + 1).astype(np.int64), each - 1)
        share = int(work[left].sum()) / rest
        off = np.abs(sums - share)
        near = off <= max((GOOD - 1) / 2 * share, off.min())
        at = int(np.flatnonzero(near)[np.lexsort((off[near], breaks[near]))[0]])
        taken = np.arange(at, at + each) % len(left)
        out.append(tuple(sorted(left[taken].tolist())))
        left = np.delete(left, taken)
    return (*out, tuple(left.tolist()))


def _window_sums(values: np.ndarray, width: int) -> np.ndarray:
    sums = np.concatenate(([0], np.cumsum(values)))
    return sums[width:] - sums[:-width]


def _exchanged(chunks: Chunks, work: np.ndarray) -> Chunks:
    """Exchange single blocks of the busiest rank while it has more than :data:`GOOD` times its share and that helps."""
    held = [np.array(of_rank) for of_rank in chunks]
    loads = np.array([work[blocks].sum() for blocks in held])
    while loads.max() > GOOD * loads.mean():
        high = int(loads.argmax())
        best = None
        for other in np.argsort(loads, kind="stable")[: len(held) - 1].tolist():
            moved = work[held[high]][:, None] - work[held[other]][None, :]
            after = np.maximum(loads[high] - moved, loads[other] + moved)
            at = int(after.argmin())
            if after.flat[at] < loads[high] and (best is None or after.flat[at] < best[0]):
                best = int(after.flat[at]), other, *divmod(at, len(held[other])), int(moved.flat[at])
        if best is None:
            break
        _, other, i, j, moved_work = best
        held[high][i], held[other][j] = held[other][j], held[high][i]
        loads[high] -= moved_work
        loads[other] += moved_work
    return tuple(tuple(sorted(blocks.tolist())) for blocks in held)
