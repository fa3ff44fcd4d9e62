"""Corpora, splits, blends, the order of samples and the loss mask, from benchmarks/evidence/definitions.md."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import gcd, isqrt
from pathlib import Path

import numpy as np

from twin.streams import derive, splitmix

TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


@dataclass(frozen=True)
class Corpus:
    """A token stream and where its documents begin (the last entry: its end)."""

    tokens: np.ndarray
    boundaries: list[int]


def read_corpus(prefix: str) -> Corpus:
    """Of PREFIX.bin and PREFIX.idx."""
    index = Path(f"{prefix}.idx").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    _, code, sequences, documents = struct.unpack("<QBQQ", index[9:34])
    lengths = np.frombuffer(index, "<i4", sequences, 34).astype(np.int64)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    first_sequence = np.frombuffer(index, "<i8", documents, 34 + 12 * sequences)
    tokens = np.fromfile(f"{prefix}.bin", TYPES[code]).astype(np.int64)
    assert len(tokens) == starts[-1]
    return Corpus(tokens, [int(starts[s]) for s in first_sequence])


def split(corpus: Corpus, fractions: list[float], seq: int) -> list[tuple[int, int]]:
    """[start, stop) of training, validation and test."""
    total, running, exact = len(corpus.tokens), 0.0, [0]
    for share in fractions:
        running += share / sum(fractions)
        exact.append(min(round(running * total), total))
    exact[-1] = total
    cuts = [min(corpus.boundaries, key=lambda b: (abs(b - edge), b)) for edge in exact]
    cuts[0], cuts[-1] = 0, total
    found = [(a, b) if share else (a, a) for a, b, share in zip(cuts, cuts[1:], fractions)]
    if any(b - a > seq >= d - c for (a, b), (c, d) in zip(zip(exact, exact[1:]), found)):
        return list(zip(exact, exact[1:]))
    return found


def permuted(x: int, n: int, name: int) -> int:
    """The image of x under the permutation of [0, n) that ``name`` stands for."""
    a = isqrt(n) if isqrt(n) ** 2 == n else isqrt(n) + 1
    b = (n + a - 1) // a
    while True:
        left, right = divmod(x, b)
        for i in range(8):
            if i % 2 == 0:
                left = (left + splitmix(right ^ derive(name, i)) % a) % a
            else:
                right = (right + splitmix(left ^ derive(name, i)) % b) % b
        x = left * b + right
        if x < n:
            return x


@dataclass(frozen=True)
class Row:
    """A sample: seq + 1 tokens, and of each of the first seq the place in the sample where its document begins."""

    tokens: np.ndarray
    starts: list[int]


class Part:
    """One split of one corpus as samples of seq + 1 tokens that overlap by one."""

    def __init__(self, corpus: Corpus, start: int, stop: int, seq: int) -> None:
        self.corpus, self.start, self.seq = corpus, start, seq
        self.size = (stop - start - 1) // seq

    def stored(self, index: int) -> Row:
        """A sample by its place in the corpus."""
        first = self.start + index * self.seq
        starts = [max([b for b in self.corpus.boundaries if b <= first + i] + [first]) - first for i in range(self.seq)]
        return Row(self.corpus.tokens[first : first + self.seq + 1], starts)

    def drawn(self, seed: int, k: int) -> Row:
        """The k-th sample of a run: each epoch a permutation."""
        epoch, place = divmod(k, self.size)
        return self.stored(permuted(place, self.size, derive(seed, epoch)))


def shares(weights: list[float], period: int = 65536) -> list[int]:
    """Samples of each corpus in one period of a blend."""
    exact = [w / sum(weights) * period for w in weights]
    counts = [max(int(x), 1) for x in exact]
    assert sum(counts) <= period, "weights below 1 / 65536 are not for this test"
    by_remainder = sorted(range(len(exact)), key=lambda i: -(exact[i] - counts[i]))
    for i in by_remainder[: period - sum(counts)]:
        counts[i] += 1
    return [c // gcd(*counts) for c in counts]


class Blend:
    """Several parts in proportion: within a period the j-th sample of a part with c of them stands at (j + ½) / c."""

    def __init__(self, parts: list[Part], weights: list[float]) -> None:
        self.parts, self.counts = parts, shares(weights)
        self.period = sum(self.counts)
        common = 1
        for c in self.counts:
            common *= c
        places = [((2 * j + 1) * common // c, d, j) for d, c in enumerate(self.counts) for j in range(c)]
        self.pattern = [(d, j) for _, d, j in sorted(places)]
        self.mixed = min(p.size * self.period // c for p, c in zip(parts, self.counts))
        for d, (part, c) in enumerate(zip(parts, self.counts)):  # none beyond its end
            self.mixed = min(self.mixed, part.size // c * self.period + self.pattern.index((d, part.size % c)))
        self.size = sum(p.size for p in parts)

    def _locate(self, k: int) -> tuple[int, int]:
        turn, at = divmod(k, self.period)
        d, j = self.pattern[at]
        return d, turn * self.counts[d] + j

    def stored(self, index: int) -> Row:
        """In stored order (evaluation): mixed until the first part has been used, then what is left, part by part."""
        if index < self.mixed:
            d, k = self._locate(index)
            return self.parts[d].stored(k)
        used = [d for d, _ in map(self._locate, range(self.mixed))]
        rest = [(d, k) for d, part in enumerate(self.parts) for k in range(used.count(d), part.size)]
        d, k = rest[index - self.mixed]
        return self.parts[d].stored(k)

    def drawn(self, seed: int, k: int) -> Row:
        """In training order: each corpus has a seed of its own."""
        d, j = self._locate(k)
        return self.parts[d].drawn(derive(seed, d), j)


def datasets(prefixes: list[str], weights: list[float], fractions: list[float], seq: int) -> list[Part | Blend]:
    """Training and validation."""
    corpora = [read_corpus(p) for p in prefixes]
    ranges = [split(c, fractions, seq) for c in corpora]
    out: list[Part | Blend] = []
    for s in (0, 1):
        parts = [Part(c, *r[s], seq) for c, r in zip(corpora, ranges)]
        out.append(Blend(parts, weights) if len(parts) > 1 else parts[0])
    return out


def loss_mask(tokens: np.ndarray, eod: int | None) -> np.ndarray:
    """1 where a prediction counts: not where it is made from an end-of-document token, if those are masked."""
    return np.ones(tokens.shape) if eod is None else (tokens != eod).astype(np.float64)
