"""Megatron-LM's sample order, so that a run can follow one of Megatron's sample by sample.

Documents are repeated for as many epochs as the run needs and shuffled, cut into
samples of s + 1 tokens at stride s, and the samples are shuffled again. The arrays are
byte-equal to those of megatron-core 0.16.1 (``GPTDataset``, ``BlendedDataset``) with its
defaults: the last partial sample dropped, one extra token for the labels. Unlike the
stateless order they grow with the run: 4 bytes a document and epoch, 12 bytes a sample.
"Document" means a sequence of the index, as it does there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import numpy as np
import xxhash

from megatron_port.data.files import atomic_file

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
    """[first, end) of the documents of each split, by Megatron's rounding."""
    weights = np.asarray(fractions, dtype=np.float64)
    edges = [0.0]
    for share in (weights / np.sum(weights)).tolist():
        edges.append(edges[-1] + share)
    return [(int(round(lo * float(count))), int(round(hi * float(count)))) for lo, hi in zip(edges, edges[1:])]


def epochs_needed(tokens_per_epoch: int, seq_length: int, num_samples: int | None) -> int:
    """Passes over the documents that give ``num_samples`` samples; None asks for one pass."""
    if num_samples is None:
        return 1
    return max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))


def samples_built(tokens_per_epoch: int, seq_length: int, num_samples: int | None) -> int:
    """Samples that the indices hold: all that fit the epochs needed."""
    return (epochs_needed(tokens_per_epoch, seq_length, num_samples) * tokens_per_epoch - 1) // seq_length


def build_indices(
    lengths: np.ndarray, first: int, end: int, *, seq_length: int, num_samples: int | None, seed: int
) -> MegatronIndices:
    """The three arrays for documents [first, end) of a corpus with document ``lengths`` (i32)."""
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
    documents = np.arange(first, end, dtype=np.int32)
    parts = []
    for repeats in ([epochs - 1, 1] if separate else [epochs]):
        part = np.tile(documents, repeats)
        random.shuffle(part)
        parts.append(part)
    document = np.concatenate(parts)
    sample = _sample_index(lengths, document, seq_length, total)
    dtype = np.int64 if total >= np.iinfo(np.uint32).max - 1 else np.uint32
    shuffles = []
    for lo, hi in ([(0, whole), (whole, total)] if whole != total else [(0, total)]):
        shuffle = np.arange(lo, hi, dtype=dtype)
        random.shuffle(shuffle)
        shuffles.append(shuffle)
    return MegatronIndices(document, sample, np.concatenate(shuffles))


def _sample_index(lengths: np.ndarray, document: np.ndarray, seq_length: int, total: int) -> np.ndarray:
    # Sample k starts at token k·s of the documents laid end to end: a search in the running sum of lengths.
    sizes = np.asarray(lengths)[document]
    ends = np.cumsum(sizes, dtype=np.int64)
    largest = max(len(document), int(np.asarray(lengths).max()))
    index = np.empty((total + 1, 2), np.int32 if largest <= np.iinfo(np.int32).max else np.int64)
    for lo in range(0, total + 1, CHUNK):
        position = np.arange(lo, min(lo + CHUNK, total + 1), dtype=np.int64) * seq_length
        entry = np.searchsorted(ends, position, side="right")
        index[lo:lo + CHUNK, 0] = entry
        index[lo:lo + CHUNK, 1] = position - (ends[entry] - sizes[entry])
    index[0] = 0  # even where the first document is empty
    return index


def normalized(weights: Sequence[float]) -> list[float]:
    """Weights that add up to 1, with Megatron's rounding."""
    w = np.asarray(weights, dtype=np.float64)
    return (w / np.sum(w)).tolist()


def blend_sizes(weights: Sequence[float], size: int) -> list[int]:
    """Samples that each corpus is built with for a blend of ``size``."""
    return [int(ceil(ceil(size * w) * (1 + SURPLUS))) for w in normalized(weights)]


def build_blend(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """(corpus i16 [size], its sample i64 [size]): each sample goes to the corpus that lags its weight most."""
    share = np.asarray(normalized(weights), dtype=np.float64)
    counts = np.zeros(len(share))
    error = np.empty_like(share)
    corpus, sample = np.empty(size, np.int16), np.empty(size, np.int64)
    for i in range(size):
        np.multiply(share, max(float(i), 1.0), out=error)
        error -= counts
        chosen = int(error.argmax())
        corpus[i], sample[i] = chosen, counts[chosen]
        counts[chosen] += 1
    return corpus, sample


def content_key(*parts: object, arrays: Sequence[np.ndarray] = ()) -> str:
    """A file name for what ``parts`` and the contents of ``arrays`` determine."""
    digest = xxhash.xxh3_128(repr(parts).encode())
    for values in arrays:
        for start in range(0, len(values), CHUNK):
            digest.update(np.ascontiguousarray(values[start:start + CHUNK]).tobytes())
    return digest.hexdigest()


def cached_arrays(
    directory: Path, key: str, names: Sequence[str], build: Callable[[], Sequence[np.ndarray]]
) -> list[np.ndarray]:
    """The arrays of ``build``, memory-mapped from ``directory/<key>-<name>.npy``; made and saved when absent.

    Every process may build: files appear whole by a rename and all writers write the same bytes, so
    neither a shared nor a node-local directory needs a leader.
    """
    paths = [directory / f"{key}-{name}.npy" for name in names]
    try:
        return [np.load(path, mmap_mode="r", allow_pickle=False) for path in paths]
    except (OSError, ValueError):
        pass  # absent, or damaged: made anew
    for path, values in zip(paths, build()):
        with atomic_file(path) as stream:
            np.save(stream, values, allow_pickle=False)
    return [np.load(path, mmap_mode="r", allow_pickle=False) for path in paths]
