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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import ceil

import numpy as np

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data.dataset import BlendedDataset, Sample, TokenDataset, checked, document_starts, too_small
from megatron_port.core.data.indexed import IndexedDataset
from megatron_port.core.data.loader import (
    SPLITS,
    corpus_datasets,
    drawn_samples,
    index_folder,
    joined,
    open_corpora,
    within_documents,
)
from megatron_port.core.errors import DataError
from megatron_port.ext.corpora.index_cache import IndexCache, Make, cached_arrays, content_key, in_memory
from megatron_port.ext.corpora.packing import PackedDataset

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


class MegatronGPTDataset:
    """Documents of a corpus in Megatron-LM's order; the indices are built at the first sample.

    Args:
        span: [first, end) of the documents.
        num_samples: samples that the run draws (None: one epoch); the order depends on it.
        documents: samples say where their documents start.
    """

    def __init__(self, data: IndexedDataset, span: tuple[int, int], *, seq_length: int, vocab_size: int,
                 num_samples: int | None, seed: int, cache: IndexCache, documents: bool = False) -> None:
        first, end = span
        self.data, self.first, self.end, self.masked = data, first, end, data.masked
        self.seq_length, self.vocab_size, self.documents = seq_length, vocab_size, documents
        self.num_samples, self.seed, self.cache = num_samples, seed, cache
        self.tokens = data.sequence_start(end) - data.sequence_start(first)
        if self.tokens <= seq_length:
            raise too_small(data.prefix, self.tokens, seq_length)

    def __len__(self) -> int:
        return samples_built(self.tokens, self.seq_length, self.num_samples)

    @cached_property
    def indices(self) -> MegatronIndices:
        """Return the three arrays, from the cache if it has them."""
        lengths = self.data.lengths
        key = content_key("gpt", 1, self.first, self.end, self.seq_length, self.num_samples, self.seed,
                          arrays=[lengths])

        def build(make: Make) -> None:
            build_indices(lengths, self.first, self.end, seq_length=self.seq_length,
                             num_samples=self.num_samples, seed=self.seed, make=make)

        names = ("document", "sample", "shuffle")
        return MegatronIndices(*cached_arrays(self.cache, key, names, build))

    def _pieces(self, index: int) -> Iterator[tuple[int, int]]:
        """Yield (position in the stream, tokens) of each document's part of a sample, in order; none is empty."""
        if not 0 <= index < len(self):
            raise DataError(f"{self.data.prefix}: sample {index} of {len(self)} in the Megatron order, which was "
                            f"built for {self.num_samples} samples")
        row = int(self.indices.shuffle[index])
        entry, offset = (int(v) for v in self.indices.sample[row])
        need = self.seq_length + 1
        while need:
            document = int(self.indices.document[entry])
            count = min(need, int(self.data.lengths[document]) - offset)
            if count:
                yield self.data.sequence_start(document) + offset, count
            need, entry, offset = need - count, entry + 1, 0

    def sample(self, index: int) -> Sample:
        pieces = list(self._pieces(index))
        parts = [checked(self.data.read(position, count), self.vocab_size, self.data, position)
                 for position, count in pieces]
        masks = [mask for position, count in pieces if (mask := self.data.read_mask(position, count)) is not None]
        # The label of a position is the token after it.
        return Sample(np.concatenate(parts), self.starts(index), np.concatenate(masks)[1:] if masks else None)

    def draw(self, seed: int, k: int) -> Sample:
        """Return sample k in Megatron's order, which has a seed of its own; ``seed`` is ignored."""
        return self.sample(k)

    def starts(self, index: int) -> np.ndarray | None:
        if not self.documents:
            return None
        return document_starts(np.cumsum([count for _, count in self._pieces(index)]), self.seq_length)

    def drawn_starts(self, seed: int, k: int) -> np.ndarray | None:
        return self.starts(k)


class MegatronBlend(BlendedDataset):
    """Datasets mixed in the order that ``order`` returns: of each sample of the run, the corpus and its sample."""

    def __init__(
        self, datasets: Sequence[TokenDataset], weights: Sequence[float], order: Callable[[], Sequence[np.ndarray]]
    ) -> None:
        super().__init__(datasets, weights)
        self._order = order

    @cached_property
    def given(self) -> Sequence[np.ndarray]:
        """The order, computed at the first use."""
        return self._order()

    def locate(self, k: int) -> tuple[int, int]:
        """Return (dataset, its sample) for sample k. O(1)."""
        if k >= len(self.given[0]):
            raise DataError(f"sample {k} of a Megatron blend that was built for {len(self.given[0])} samples")
        return int(self.given[0][k]), int(self.given[1][k])

    def _stored(self, index: int) -> tuple[TokenDataset, int]:
        owner, local = self.locate(index)
        return self.datasets[owner], local


def megatron_samples(
    run: RunConfig, corpora: Sequence[IndexedDataset], train_samples: int, *, check: bool = False
) -> list[TokenDataset | None]:
    """Return the dataset of each split (``registry.SAMPLES``). Raises DataError: a corpus is too small."""
    s, cache = run.model.seq_length, IndexCache(index_folder(run), check)
    ranges = [split_ranges(run.data.split, c.num_sequences) for c in corpora]
    tokens = [[c.sequence_start(end) - c.sequence_start(first) for first, end in r] for c, r in zip(corpora, ranges)]
    made: list[TokenDataset | None] = []
    for index, split in enumerate(SPLITS):
        usable = [i for i in range(len(corpora)) if tokens[i][index] > s]
        if split == "train" and len(usable) < len(corpora):
            i = next(i for i in range(len(corpora)) if i not in usable)
            raise too_small(corpora[i].prefix, tokens[i][index], s)
        weights = [run.data.weights[i] if run.data.weights else float(tokens[i][index]) for i in usable]
        wanted: list[int | None] = [None] * len(usable)
        if split == "train":
            wanted = list(blend_sizes(weights, train_samples)) if len(usable) > 1 else [train_samples]
        parts = [MegatronGPTDataset(corpora[i], ranges[i][index], seq_length=s, vocab_size=run.model.vocab_size,
                                    num_samples=n, seed=run.seed, cache=cache, documents=within_documents(run))
                 for i, n in zip(usable, wanted)]
        if split == "train" and len(parts) > 1:
            key = content_key("blend", 1, weights, train_samples)
            # Bound now: it is called at the first sample, when the loop's names belong to another split.
            build = partial(build_blend, weights, train_samples)
            order = partial(cached_arrays, cache, key, ("corpus", "sample"), build)
            made.append(MegatronBlend(parts, weights, order))
        else:
            made.append(joined(parts, weights))
    return made


# Indices of a run's samples, built ahead of time: ``data index``.

def build_sample_index(run: RunConfig, *, train_samples: int | None = None) -> list[str]:
    """Build the indices of ``data.order = "megatron"`` or of packing, or check existing ones; return a line for each
    part.

    Raises:
        DataError: a corpus that is missing, damaged or too small, or the folder cannot be written.
    """
    data = run.data
    if data.synthetic or (data.order != "megatron" and data.packing == "none"):
        return [f'data.order = "{data.order}" keeps no index: sample k is computed from k']
    corpora = open_corpora(run)
    lines = []
    for split, dataset in zip(SPLITS, corpus_datasets(run, corpora, drawn_samples(run, train_samples), check=True)):
        parts = dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]
        if isinstance(dataset, MegatronBlend):
            _ = dataset.given
        for part in parts:
            if isinstance(part, MegatronGPTDataset):
                made = part.indices
                size = sum(a.nbytes for a in (made.document, made.sample, made.shuffle))
                lines.append(f"{split:5} {part.data.prefix}: {len(part)} samples, {size} bytes")
            elif isinstance(part, PackedDataset):
                lines.append(f"{split:5} {part.data.prefix}: {part.describe()}")
    return lines
