"""Megatron-LM's sample order, so that a run can follow one of Megatron's sample by sample.

Documents are repeated for as many epochs as the run needs and shuffled, cut into
samples of s + 1 tokens at stride s, and the samples are shuffled again. The arrays are
byte-equal to those of megatron-core 0.16.1 (``GPTDataset``, ``BlendedDataset``) with its
defaults: the last partial sample dropped, one extra token for the labels. Unlike the
stateless order they grow with the run: 4 bytes a document and epoch, 12 bytes per sample;
they are made in files (``data.index_cache``), not in memory.
"Document" means a sequence of the index, as it does there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from megatron_port.core.data.indexed import Make, in_memory

SEPARATE_BELOW = 0.80
"""A last epoch that is used to less than this share is shuffled apart from the others."""
SURPLUS = 0.005
"""Extra samples that each corpus of a blend is built with."""
CHUNK = 1 << 20


@dataclass(frozen=True)
class MegatronIndices:
    """``document`` i32 [epochs · documents]; ``sample`` [samples + 1, 2] (entry of ``document``, offset in it);
    ``shuffle`` u32 [samples]."""

    document: np.ndarray
    sample: np.ndarray
    shuffle: np.ndarray


def split_ranges(fractions: Sequence[float], count: int) -> list[tuple[int, int]]:
    """Return [first, end) of the documents of each split, by Megatron's rounding."""
    weights = np.asarray(fractions, dtype=np.float64)
    edges = [0.0]
    for share in (weights / np.sum(weights)).tolist():
        edges.append(edges[-1] + share)
    return [(int(round(lo * float(count))), int(round(hi * float(count)))) for lo, hi in zip(edges, edges[1:])]


def epochs_needed(tokens_per_epoch: int, seq_length: int, num_samples: int | None) -> int:
    """Return the passes over the documents that give ``num_samples`` samples; None: one pass."""
    if num_samples is None:
        return 1
    return max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))


def samples_built(tokens_per_epoch: int, seq_length: int, num_samples: int | None) -> int:
    """Samples that the indices hold: all that fit the epochs needed."""
    return (epochs_needed(tokens_per_epoch, seq_length, num_samples) * tokens_per_epoch - 1) // seq_length


def build_indices(
    lengths: np.ndarray, first: int, end: int, *, seq_length: int, num_samples: int | None, seed: int,
    make: Make = in_memory,
) -> MegatronIndices:
    """The three arrays for documents [first, end) of a corpus with document ``lengths`` (i32), filled where ``make``
    puts them. Beside them memory stays within a few ``CHUNK``."""
    tokens = int(np.sum(lengths[first:end], dtype=np.int64))
    if tokens <= seq_length:
        raise ValueError(f"{tokens} tokens do not hold a sample of {seq_length} + 1")
    epochs = epochs_needed(tokens, seq_length, num_samples)
    total = (epochs * tokens - 1) // seq_length
    whole = total
    separate = False
    if epochs > 1 and num_samples is not None:
        before = ((epochs - 1) * tokens - 1) // seq_length
        separate = num_samples - before < int(SEPARATE_BELOW * ((tokens - 1) // seq_length))
        whole = before if separate else total
    random = np.random.RandomState(seed)
    count = end - first
    document = make("document", np.int32, (epochs * count,))
    for epoch in range(epochs):
        document[epoch * count:(epoch + 1) * count] = np.arange(first, end, dtype=np.int32)
    cut = (epochs - 1) * count
    for part in ([document[:cut], document[cut:]] if separate else [document]):
        random.shuffle(part)
    largest = max(len(document), int(lengths.max()))
    sample = make("sample", np.int32 if largest <= np.iinfo(np.int32).max else np.int64, (total + 1, 2))
    _fill_samples(sample, lengths, document, seq_length)
    dtype = np.int64 if total >= np.iinfo(np.uint32).max - 1 else np.uint32
    shuffle = make("shuffle", dtype, (total,))
    for lo in range(0, total, CHUNK):
        shuffle[lo:lo + CHUNK] = np.arange(lo, min(lo + CHUNK, total), dtype=dtype)
    for part in ([shuffle[:whole], shuffle[whole:]] if whole != total else [shuffle]):
        random.shuffle(part)
    return MegatronIndices(document, sample, shuffle)


def _fill_samples(index: np.ndarray, lengths: np.ndarray, document: np.ndarray, seq_length: int) -> None:
    # Sample k starts at token k·s of the documents laid end to end: a search in the running sum of lengths.
    begun = done = 0
    for lo in range(0, len(document), CHUNK):
        sizes = np.asarray(lengths)[document[lo:lo + CHUNK]]
        ends = begun + np.cumsum(sizes, dtype=np.int64)
        last = int(ends[-1])
        stop = min(-(-last // seq_length), len(index))
        for first in range(done, stop, CHUNK):
            position = np.arange(first, min(first + CHUNK, stop), dtype=np.int64) * seq_length
            entry = np.searchsorted(ends, position, side="right")
            index[first:first + len(position), 0] = lo + entry
            index[first:first + len(position), 1] = position - (ends[entry] - sizes[entry])
        begun, done = last, max(done, stop)
    index[0] = 0  # even where the first document is empty


def normalized(weights: Sequence[float]) -> list[float]:
    """Return weights that add up to 1, with Megatron's rounding."""
    w = np.asarray(weights, dtype=np.float64)
    found: list[float] = (w / np.sum(w)).tolist()
    return found


def blend_sizes(weights: Sequence[float], size: int) -> list[int]:
    """Return the samples with which each corpus is built for a blend of ``size``."""
    return [int(ceil(ceil(size * w) * (1 + SURPLUS))) for w in normalized(weights)]


def build_blend(weights: Sequence[float], size: int, make: Make = in_memory) -> tuple[np.ndarray, np.ndarray]:
    """Return (corpus i16 [size], its sample i64 [size]): each sample goes to the corpus that lags its weight most."""
    share = np.asarray(normalized(weights), dtype=np.float64)
    counts = np.zeros(len(share))
    error = np.empty_like(share)
    corpus, sample = make("corpus", np.int16, (size,)), make("sample", np.int64, (size,))
    for i in range(size):
        np.multiply(share, max(float(i), 1.0), out=error)
        error -= counts
        chosen = int(error.argmax())
        corpus[i], sample[i] = chosen, counts[chosen]
        counts[chosen] += 1
    return corpus, sample
