"""Samples: seq + 1 tokens each, from a corpus, a blend of corpora, or an integer hash."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isqrt
from pathlib import Path
from typing import Protocol

import numpy as np

from megatron_port.core.data.indexed import IndexedDataset, bad_token
from megatron_port.core.errors import DataError

# One sample of a dataset: its tokens, where its documents start, and which of its labels count.

@dataclass(frozen=True)
class Sample:
    """``seq + 1`` tokens: positions 0 to seq - 1 are read, and the label of position i is token i + 1."""

    tokens: np.ndarray
    """int64 [seq + 1]"""
    starts: np.ndarray | None = None
    """int32 [seq]: where in the sample the document of each position starts; None: the sample is one document"""
    counted: np.ndarray | None = None
    """bool [seq]: whether the label of a position has a loss; None: all do"""
    side: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Arrays that the run's objective reads beside the tokens (``data.objective``), by name"""


def document_starts(edges: np.ndarray, seq_length: int) -> np.ndarray:
    """Return for each position of a sample where its document starts, int32 [seq_length].

    ``edges``: positions where documents start, in any order; those outside of the sample are left out. What comes
    before the first is one document.
    """
    starts = np.zeros(seq_length, dtype=np.int32)
    inside = edges[(edges > 0) & (edges < seq_length)]
    starts[inside] = inside
    found: np.ndarray = np.maximum.accumulate(starts)
    return found


# Stateless sample order: the k-th training sample is a function of (seed, k).
#
# Each epoch is a permutation of the samples, keyed by (seed, epoch), evaluated at
# one point without storing it: a Feistel network over the rectangle a × b with
# a = ⌈√n⌉, b = ⌈n/a⌉, whose few surplus points are walked through until one falls
# below n (Black & Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). The
# round function is the finaliser of SplitMix64. Integer arithmetic only, so the order
# is the same on every machine; changing it breaks resumption of old runs.

ROUNDS = 8
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser on uint64, elementwise (Steele, Lea & Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: np.ndarray = x ^ (x >> np.uint64(31))
    return found


def derive(*values: int) -> int:
    """Return a 64-bit key from integers; their order matters."""
    state = 0
    for value in values:
        state = ((state ^ (value & MASK)) + GOLDEN) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        state ^= state >> 31
    return state


def _round_trip(x: np.ndarray, a: int, b: int, keys: np.ndarray) -> np.ndarray:
    left: np.ndarray = x // np.uint64(b)
    right: np.ndarray = x % np.uint64(b)
    for i, key in enumerate(keys):
        if i % 2 == 0:
            left = (left + mix(right ^ key) % np.uint64(a)) % np.uint64(a)
        else:
            right = (right + mix(left ^ key) % np.uint64(b)) % np.uint64(b)
    found: np.ndarray = left * np.uint64(b) + right
    return found


def permute(indices: np.ndarray, n: int, key: int) -> np.ndarray:
    """Apply the permutation of [0, n) given by ``key`` to ``indices`` (integers in [0, n)); return int64.

    O(1) memory per index, n up to 2^62.
    """
    x = np.atleast_1d(np.asarray(indices)).astype(np.uint64)
    if n < 1 or (x.size and int(x.max()) >= n):
        raise ValueError(f"indices must lie in [0, {n})")
    root = isqrt(n)
    a = root if root * root == n else root + 1
    b = -(-n // a)
    keys = np.array([derive(key, i) for i in range(ROUNDS)], dtype=np.uint64)
    x = _round_trip(x, a, b, keys)
    outside = np.flatnonzero(x >= n)
    while outside.size:
        x[outside] = _round_trip(x[outside], a, b, keys)
        outside = outside[x[outside] >= n]
    return x.astype(np.int64)


def sample_at(seed: int, global_sample: int, n: int) -> tuple[int, int]:
    """Return (epoch, index in [0, n)) of the ``global_sample``-th sample of a run over n samples."""
    epoch, offset = divmod(global_sample, n)
    return epoch, int(permute(np.array([offset]), n, derive(seed, epoch))[0])


PERIOD = 1 << 16
"""Samples after which a stateless blend repeats: weights are rounded to multiples of 1 / 65536."""


class TokenDataset(Protocol):
    """Samples of ``seq_length + 1`` tokens."""

    @property
    def masked(self) -> bool:
        """Whether samples may have labels that do not count."""

    def __len__(self) -> int:
        """Samples in one epoch."""

    def sample(self, index: int) -> Sample:
        """Return sample ``index`` in stored order."""

    def draw(self, seed: int, k: int) -> Sample:
        """Return sample k of a training run, counted from its start."""

    def starts(self, index: int) -> np.ndarray | None:
        """Return the ``starts`` of sample ``index`` without reading its tokens."""

    def drawn_starts(self, seed: int, k: int) -> np.ndarray | None:
        """Return the ``starts`` of sample k of a training run without reading its tokens."""


def split_positions(data: IndexedDataset, fractions: Sequence[float], seq_length: int) -> list[tuple[int, int]]:
    """Return [start, stop) of the token stream for each split, cut at the document boundary nearest to its share.

    Where that would leave a split without one sample although its share holds one
    (few, long documents), all cuts are made at the exact token instead.
    """
    total = float(sum(fractions))
    edges, running = [0], 0.0
    for share in fractions:
        running += share / total
        edges.append(min(round(running * data.num_tokens), data.num_tokens))
    edges[-1] = data.num_tokens
    exact = list(zip(edges, edges[1:]))
    cuts = [data.nearest_document(edge) for edge in edges]
    cuts[0], cuts[-1] = 0, data.num_tokens
    rounded = [(lo, hi) if share else (lo, lo) for lo, hi, share in zip(cuts, cuts[1:], fractions)]
    lost = any(b - a > seq_length >= hi - lo for (a, b), (lo, hi) in zip(exact, rounded))
    return exact if lost else rounded


def checked(tokens: np.ndarray, vocab_size: int, data: IndexedDataset, position: int) -> np.ndarray:
    """Return ``tokens``, int64 and read from ``position`` on. DataError: an id that the model has no embedding for."""
    if int(tokens.view(np.uint64).max()) >= vocab_size:  # one look: as unsigned, a negative one is larger than any
        at = int(np.flatnonzero((tokens >= vocab_size) | (tokens < 0))[0])
        raise bad_token(data.prefix, position + at, int(tokens[at]), vocab_size)
    return tokens


class GPTDataset:
    """The tokens [start, stop) of a corpus as samples at stride ``seq_length``; each epoch a permutation.

    ``documents``: samples say where their documents start.

    Raises:
        DataError: fewer than seq_length + 1 tokens; on reading, an id that is not below ``vocab_size``.
    """

    def __init__(self, data: IndexedDataset, *, seq_length: int, vocab_size: int,
                 start: int = 0, stop: int | None = None, documents: bool = False) -> None:
        self.data, self.seq_length, self.vocab_size, self.start = data, seq_length, vocab_size, start
        self.masked = data.masked
        self.documents = documents
        self.tokens = (data.num_tokens if stop is None else stop) - start
        if self.tokens <= seq_length:
            raise too_small(data.prefix, self.tokens, seq_length)
        self._samples = (self.tokens - 1) // seq_length

    def __len__(self) -> int:
        return self._samples

    def _position(self, index: int) -> int:
        if not 0 <= index < self._samples:
            raise ValueError(f"sample {index} of {self._samples}")
        return self.start + index * self.seq_length

    def sample(self, index: int) -> Sample:
        position = self._position(index)
        tokens = checked(self.data.read(position, self.seq_length + 1), self.vocab_size, self.data, position)
        return Sample(tokens, self.starts(index), self.data.read_mask(position + 1, self.seq_length))

    def draw(self, seed: int, k: int) -> Sample:
        return self.sample(sample_at(seed, k, self._samples)[1])

    def starts(self, index: int) -> np.ndarray | None:
        if not self.documents:
            return None
        return document_starts(self.data.documents_in(self._position(index), self.seq_length), self.seq_length)

    def drawn_starts(self, seed: int, k: int) -> np.ndarray | None:
        return self.starts(sample_at(seed, k, self._samples)[1]) if self.documents else None


def too_small(prefix: Path, tokens: int, seq_length: int) -> DataError:
    """Return the error for a split that does not hold one sample."""
    return DataError(f"{prefix}: {tokens} tokens in this split, one sample needs model.seq_length + 1 = "
                     f"{seq_length + 1}; use a larger corpus, another data.split or a shorter sequence")


def quantised(weights: Sequence[float]) -> list[int]:
    """Return positive integers in proportion to ``weights`` that add up to at most ``PERIOD``.

    They are rounded by largest remainders, then divided by their greatest common divisor.
    """
    if not weights or min(weights) <= 0:
        raise DataError(f"data.weights: {list(weights)}; every weight must be above 0 (leave the corpus out instead)")
    shares = np.asarray(weights, dtype=np.float64)
    exact = shares / np.sum(shares) * PERIOD
    counts = np.maximum(np.floor(exact).astype(np.int64), 1)
    # Corpora of nearly no weight still get one sample; those with more pay for it.
    while counts.sum() > PERIOD:
        counts[int(np.argmax(np.where(counts > 1, counts - exact, -np.inf)))] -= 1
    for i in np.argsort(-(exact - counts), kind="stable")[:PERIOD - int(counts.sum())]:
        counts[i] += 1
    found: list[int] = (counts // np.gcd.reduce(counts)).tolist()
    return found


class BlendedDataset:
    """Several datasets mixed by weight; the dataset that serves sample k is a function of k alone.

    Within a period corpus d serves c_d samples, the j-th of them at the place nearest to
    (j + ½) / c_d of the period, so every stretch of the run has the proportions of the whole.
    In stored order (evaluation) each sample of each corpus comes once: mixed until the first corpus has been used, then
    what is left of the others, one after the other.
    """

    def __init__(self, datasets: Sequence[TokenDataset], weights: Sequence[float]) -> None:
        if len(datasets) != len(weights):
            raise DataError(f"data.weights: {len(weights)} weights for {len(datasets)} corpora; give one for each")
        self.datasets = list(datasets)
        self.counts = quantised(weights)
        self.period = sum(self.counts)
        share = np.concatenate([(np.arange(c) + 0.5) / c for c in self.counts])
        owner = np.repeat(np.arange(len(self.counts)), self.counts)
        place = np.argsort(share, kind="stable")
        self._owner = owner[place].astype(np.int32)
        self._rank = np.concatenate([np.arange(c) for c in self.counts])[place].astype(np.int32)

    def __len__(self) -> int:
        """Samples of all corpora."""
        return sum(len(d) for d in self.datasets)

    @cached_property
    def _mixed(self) -> int:
        """Samples in stored order until the first corpus has been used, and never more of a corpus than it has: within
        a period it may be a sample ahead of its share."""
        shares = (len(d) * self.period // c for d, c in zip(self.datasets, self.counts))
        return min(*shares, *(self._place(i, len(d)) for i, d in enumerate(self.datasets)))

    def _place(self, corpus: int, number: int) -> int:
        """Return which sample of the blend is sample ``number`` of a corpus, counted without end."""
        turns, rank = divmod(number, self.counts[corpus])
        return turns * self.period + int(np.flatnonzero((self._owner == corpus) & (self._rank == rank))[0])

    @cached_property
    def _used(self) -> list[int]:
        """Samples of each corpus among the mixed ones."""
        turns, rest = divmod(self._mixed, self.period)
        served = np.bincount(self._owner[:rest], minlength=len(self.counts))
        return [turns * c + int(n) for c, n in zip(self.counts, served)]

    def locate(self, k: int) -> tuple[int, int]:
        """Return (dataset, how many samples it served before) for sample k. O(1)."""
        turn, at = divmod(k, self.period)
        owner = int(self._owner[at])
        return owner, turn * self.counts[owner] + int(self._rank[at])

    @property
    def masked(self) -> bool:
        """Whether one of the datasets is."""
        return any(dataset.masked for dataset in self.datasets)

    def _stored(self, index: int) -> tuple[TokenDataset, int]:
        """Return (dataset, its sample) for sample ``index`` in stored order."""
        left = index - self._mixed
        if left < 0:
            owner, local = self.locate(index)
            return self.datasets[owner], local
        for dataset, used in zip(self.datasets, self._used):
            if left < len(dataset) - used:
                return dataset, used + left
            left -= len(dataset) - used
        raise IndexError(f"sample {index} of {len(self)}")

    def sample(self, index: int) -> Sample:
        dataset, local = self._stored(index)
        return dataset.sample(local)

    def draw(self, seed: int, k: int) -> Sample:
        owner, local = self.locate(k)
        return self.datasets[owner].draw(derive(seed, owner), local)

    def starts(self, index: int) -> np.ndarray | None:
        dataset, local = self._stored(index)
        return dataset.starts(local)

    def drawn_starts(self, seed: int, k: int) -> np.ndarray | None:
        owner, local = self.locate(k)
        return self.datasets[owner].drawn_starts(derive(seed, owner), local)


class SyntheticDataset:
    """Tokens from an integer hash of (seed, sample, position): nothing to download, the same everywhere.

    Positions come in runs of 8: a run starts at a token drawn with more weight on small
    ids and counts upwards, so a model that learns "add one" predicts seven of eight.
    ``documents``: a document starts at drawn positions, about four in a sample, whatever the runs.
    """

    RUN, DOCUMENTS = 8, 4
    masked = False

    def __init__(self, *, seq_length: int, vocab_size: int, seed: int, samples: int = 1 << 40,
                 documents: bool = False) -> None:
        self.seq_length, self.vocab_size, self.seed, self._samples = seq_length, vocab_size, seed, samples
        self.documents = documents

    def __len__(self) -> int:
        return self._samples

    def sample(self, index: int) -> Sample:
        position = np.arange(self.seq_length + 1, dtype=np.uint64)
        run, step = position // np.uint64(self.RUN), position % np.uint64(self.RUN)
        # 26 bits, squared: integer arithmetic, so no rounding differs between machines.
        draw = mix(run + np.uint64(derive(self.seed, index))) >> np.uint64(38)
        start = (((draw * draw) >> np.uint64(26)) * np.uint64(self.vocab_size)) >> np.uint64(26)
        tokens = ((start + step) % np.uint64(self.vocab_size)).astype(np.int64)
        return Sample(tokens, self.starts(index))

    def draw(self, seed: int, k: int) -> Sample:
        """Return sample k; ``seed`` is ignored, since the tokens depend on the dataset's own."""
        return self.sample(k)

    def starts(self, index: int) -> np.ndarray | None:
        if not self.documents:
            return None
        position = np.arange(self.seq_length, dtype=np.uint64)
        drawn = mix(position + np.uint64(derive(self.seed, index, 1)))
        edges = np.flatnonzero(drawn % np.uint64(max(self.seq_length // self.DOCUMENTS, 1)) == 0)
        return document_starts(edges, self.seq_length)

    def drawn_starts(self, seed: int, k: int) -> np.ndarray | None:
        return self.starts(k)
