"""Packing: whole documents in each sample. In fine-tuning a document cut in two would lose its question.

A sample has ``seq_length + 1`` places for tokens. Documents are laid into samples longest first, each into the first
sample that has room (first-fit decreasing: Johnson, 1973; at most 11/9 of the samples needed, and one). No token is
left out. A document longer than a sample is cut into pieces of ``seq_length + 1`` tokens that share one with the piece
before, so that each of its labels is in one piece; a later piece does not see the earlier ones.

What is left at the end of a sample is padding, a document of its own. Its labels have no loss, nor has the first token
of a document, which the one before it says nothing about, nor what the corpus' own mask leaves out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data.dataset import Sample, TokenDataset, checked, document_starts, sample_at
from megatron_port.core.data.indexed import IndexedDataset
from megatron_port.core.data.loader import SPLITS, index_folder, joined
from megatron_port.core.data.objective import objective_of
from megatron_port.core.errors import DataError
from megatron_port.ext.corpora.index_cache import IndexCache, Make, cached_arrays, content_key, in_memory

PADDING = 0
"""The token of padding: any will do, since nothing looks at it."""


@dataclass(frozen=True)
class PackedIndices:
    """``position`` i64 [pieces]: first token of each piece in the stream; ``length`` i32 [pieces]; ``first`` i64
    [samples + 1]: the first piece of each sample. Pieces lie sample after sample, in corpus order within one."""

    position: np.ndarray
    length: np.ndarray
    first: np.ndarray

    def describe(self, seq_length: int) -> str:
        """Return the number of samples and how full they are, in words."""
        samples, tokens = len(self.first) - 1, int(self.length.sum(dtype=np.int64))
        return (f"{samples} samples of {len(self.length) / samples:.1f} documents, "
                f"{tokens / (samples * (seq_length + 1)):.1%} filled")


def cut(edges: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (position, length) of the pieces of documents, int64 [pieces] each, in order.

    Args:
        edges: int64 [documents + 1], ascending: where each document starts, and where the last one ends.
        size: most tokens of a piece. The pieces of a longer document share a token with their neighbours.
    """
    starts, lengths = edges[:-1], np.diff(edges)
    starts, lengths = starts[lengths > 0], lengths[lengths > 0]
    count = np.maximum(-(-(lengths - 1) // (size - 1)), 1)
    number = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    offset = number * (size - 1)
    return np.repeat(starts, count) + offset, np.minimum(np.repeat(lengths, count) - offset, size)


def first_fit(lengths: np.ndarray, size: int) -> np.ndarray:
    """Return the bin of each item, int64 [items]: longest first, each into the first bin of ``size`` that has room.

    Items of one length are placed at once: they fill the open bins in order. Time: items + distinct lengths · bins.
    """
    order = np.argsort(-lengths, kind="stable")
    found = np.empty(len(order), dtype=np.int64)
    room = np.empty(len(order), dtype=np.int64)  # of the bins: at most as many as items
    bins = at = 0
    for length, count in zip(*(values[::-1].tolist() for values in np.unique(lengths, return_counts=True))):
        fitting = np.flatnonzero(room[:bins] >= length)
        fits = room[fitting] // length
        fits = np.clip(count - (np.cumsum(fits) - fits), 0, fits)
        room[fitting] -= fits * length
        opened = np.arange(count - int(fits.sum())) // (size // length)
        new = np.bincount(opened)
        room[bins:bins + len(new)] = size - new * length
        found[order[at:at + count]] = np.concatenate([np.repeat(fitting, fits), bins + opened])
        bins, at = bins + len(new), at + count
    return found


def build_indices(edges: np.ndarray, seq_length: int, make: Make = in_memory) -> PackedIndices:
    """Return the packing of the documents between ``edges`` (see :func:`cut`), filled where ``make`` puts it."""
    starts, lengths = cut(edges, seq_length + 1)
    bins = first_fit(lengths, seq_length + 1)
    order = np.argsort(bins, kind="stable")
    position = make("position", np.int64, (len(order),))
    length = make("length", np.int32, (len(order),))
    position[:], length[:] = starts[order], lengths[order]
    counts = np.bincount(bins)
    first = make("first", np.int64, (len(counts) + 1,))
    first[0] = 0
    np.cumsum(counts, out=first[1:])
    return PackedIndices(position, length, first)


def document_splits(data: IndexedDataset, fractions: tuple[float, ...], *, unit: int = 1) -> list[tuple[int, int]]:
    """Return [first, end) of the documents of each split, by tokens: cut at the document nearest to each share.

    ``unit``: so many neighbours stay together.
    """
    total = float(sum(fractions))
    cuts, running = [0], 0.0
    for share in fractions[:-1]:
        running += share / total
        cuts.append(max(_nearest(data, running * data.num_tokens) // unit * unit, cuts[-1]))
    cuts.append(data.num_documents)
    return [(lo, hi) if share else (lo, lo) for lo, hi, share in zip(cuts, cuts[1:], fractions)]


def _nearest(data: IndexedDataset, position: float) -> int:
    """The document that starts closest to ``position``; one more than the last: the end is closer."""
    after = bisect_left(range(data.num_documents), position, key=data.document_start)
    return min(range(max(after - 1, 0), after + 1), key=lambda i: abs(data.document_start(i) - position))


class PackedDataset:
    """Documents [first, end) of a corpus, packed (see the module); each epoch a permutation of the samples.

    Where documents are is built at the first use, in ``cache``.

    Raises:
        DataError: no document with two tokens; on reading, an id that is not below ``vocab_size``.
    """

    masked = True

    def __init__(
        self, data: IndexedDataset, *, first: int, end: int, seq_length: int, vocab_size: int, cache: IndexCache
    ) -> None:
        self.data, self.first, self.end = data, first, end
        self.seq_length, self.vocab_size, self.cache = seq_length, vocab_size, cache
        self.tokens = data.document_start(end) - data.document_start(first)
        if first == end or not self.tokens:
            raise DataError(f"{data.prefix}: no documents in this split; use a larger corpus or another data.split")

    @cached_property
    def indices(self) -> PackedIndices:
        """Return the packing, from the cache if it has it."""
        edges = self.data.document_edges(self.first, self.end)
        key = content_key("packing", 1, self.seq_length, arrays=[edges])
        names = ("position", "length", "first")
        return PackedIndices(*cached_arrays(
            self.cache, key, names, lambda make: build_indices(edges, self.seq_length, make)
        ))

    def __len__(self) -> int:
        return len(self.indices.first) - 1

    def describe(self) -> str:
        """Return the number of samples and how full they are, in words."""
        return self.indices.describe(self.seq_length)

    def _pieces(self, index: int) -> Iterator[tuple[int, int]]:
        """Yield (position in the stream, tokens) of each piece of a sample, in order."""
        if not 0 <= index < len(self):
            raise ValueError(f"sample {index} of {len(self)}")
        lo, hi = (int(v) for v in self.indices.first[index:index + 2])
        yield from zip(self.indices.position[lo:hi].tolist(), self.indices.length[lo:hi].tolist())

    def sample(self, index: int) -> Sample:
        tokens = np.full(self.seq_length + 1, PADDING, dtype=np.int64)
        counted = np.zeros(self.seq_length, dtype=bool)
        at = 0
        for position, length in self._pieces(index):
            tokens[at:at + length] = checked(self.data.read(position, length), self.vocab_size, self.data, position)
            mask = self.data.read_mask(position, length)
            counted[at:at + length - 1] = True if mask is None else mask[1:]
            at += length
        return Sample(tokens, self.starts(index), counted)

    def draw(self, seed: int, k: int) -> Sample:
        return self.sample(sample_at(seed, k, len(self))[1])

    def starts(self, index: int) -> np.ndarray | None:
        return document_starts(np.cumsum([length for _, length in self._pieces(index)]), self.seq_length)

    def drawn_starts(self, seed: int, k: int) -> np.ndarray | None:
        return self.starts(sample_at(seed, k, len(self))[1])


class PairDataset(PackedDataset):
    """Documents [first, end) of a corpus of preferences, two in each sample; each epoch a permutation of the pairs.

    The chosen conversation comes first, then the rejected one, each a document of its own. Attention stays within a
    document, so neither answer sees the other, and where the second one starts tells them apart on every stage. A pair
    is never cut, and is in one sample, so that its loss is a function of that sample alone.

    ``reference``: float64 [documents of the corpus], the reference's log-probability of each.

    Raises:
        DataError: no pair in this split, or one that is longer than a sample; on reading, an id that is not below
            ``vocab_size``.
    """

    def __init__(
        self, data: IndexedDataset, reference: np.ndarray, *, first: int, end: int, seq_length: int, vocab_size: int
    ) -> None:
        super().__init__(
            data, first=first, end=end, seq_length=seq_length, vocab_size=vocab_size, cache=IndexCache(Path())
        )
        self.reference = reference[first:end].reshape(-1, 2)
        tokens = self.indices.length.reshape(-1, 2).sum(axis=1)
        if int(tokens.max()) > seq_length + 1:
            raise DataError(
                f"{data.prefix}: pair {first // 2 + int(tokens.argmax())} has {int(tokens.max())} tokens in its two "
                f"conversations, a sample model.seq_length + 1 = {seq_length + 1}: raise model.seq_length, or prepare "
                f"again with --longest-pair {seq_length + 1} --bad-input skip"
            )

    @cached_property
    def indices(self) -> PackedIndices:
        """Return which documents are in which sample: two in each."""
        edges = self.data.document_edges(self.first, self.end)
        return PackedIndices(edges[:-1], np.diff(edges), np.arange(0, len(edges), 2))

    def sample(self, index: int) -> Sample:
        found = super().sample(index)
        return Sample(found.tokens, found.starts, found.counted, {"reference": self.reference[index]})


def packed_samples(
    run: RunConfig, corpora: Sequence[IndexedDataset], train_samples: int, *, check: bool = False
) -> list[TokenDataset | None]:
    """Return the dataset of each split (``registry.SAMPLES``). Raises DataError: a corpus is too small."""
    objective, cache = objective_of(run), IndexCache(index_folder(run), check)
    own = objective.documents_of_sample
    ranges = [document_splits(c, run.data.split, unit=own or 1) for c in corpora]
    makers = [
        objective.datasets(c) if own else partial(PackedDataset, c, cache=cache)
        for c in corpora
    ]
    made: list[TokenDataset | None] = []
    for index, split in enumerate(SPLITS):
        parts: list[TokenDataset] = []
        shares: list[float] = []
        for i, corpus in enumerate(corpora):
            first, end = ranges[i][index]
            tokens = corpus.document_start(end) - corpus.document_start(first)
            if split != "train" and not tokens:
                continue
            s, v = run.model.seq_length, run.model.vocab_size
            parts.append(makers[i](first=first, end=end, seq_length=s, vocab_size=v))
            shares.append(run.data.weights[i] if run.data.weights else float(tokens))
        made.append(joined(parts, shares))
    return made
