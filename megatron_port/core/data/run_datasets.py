"""Datasets of a run's splits: which documents are for training, validation and test, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data import megatron_order as mo
from megatron_port.core.data.dataset import (
    BlendedDataset,
    GPTDataset,
    MegatronGPTDataset,
    SyntheticDataset,
    TokenDataset,
    split_positions,
    too_small,
)
from megatron_port.core.data.index_cache import cached_arrays, content_key
from megatron_port.core.data.indexed import IndexedDataset, check_local, open_all
from megatron_port.core.data.order import derive
from megatron_port.core.data.packing import PackedDataset, document_splits
from megatron_port.ext.corpora.remote import RemoteCache
from megatron_port.ext.objectives.pairs import PairDataset, check_pairs
from megatron_port.ext.objectives.reference_losses import read_reference

SPLITS = ("train", "valid", "test")


def index_folder(run: RunConfig) -> Path:
    """Return the folder of the sample indices of a run."""
    return Path(run.data.index_cache) if run.data.index_cache else Path(run.output_dir) / "data_cache"


def open_corpora(run: RunConfig) -> list[IndexedDataset]:
    """Open the corpora of ``data.train``; what is remote is kept below ``data.remote_cache``.

    Raises:
        DataError: a corpus that is missing or damaged.
    """
    data = run.data
    cache = RemoteCache(data.remote_cache or str(index_folder(run)), int(data.remote_cache_gb * 1e9))
    # Indices of each split: three arrays in Megatron's order, at most as many when packed.
    corpora = open_all(data.train, cache, further=3 * len(SPLITS))
    check_local(corpora)
    return corpora


def within_documents(run: RunConfig) -> bool:
    """Return whether samples say where their documents start."""
    return run.data.attention_documents == "within"


def synthetic_datasets(run: RunConfig) -> list[TokenDataset | None]:
    """Return drawn tokens for each split, each with a seed of its own."""
    return [SyntheticDataset(seq_length=run.model.seq_length, vocab_size=run.model.vocab_size,
                             seed=derive(run.seed, index), documents=within_documents(run))
            for index in range(len(SPLITS))]


def corpus_datasets(
    run: RunConfig, corpora: Sequence[IndexedDataset], train_samples: int, *, check: bool = False
) -> list[TokenDataset | None]:
    """Return the dataset of each split, in the order that the run asks for; None where a split holds no sample.

    ``train_samples``: that the run draws, which Megatron's order depends on; ``check``: compare indices that are there
    with their hashes.

    Raises:
        DataError: a corpus that is too small.
    """
    check_pairs(corpora, wanted=run.training.on_pairs)
    if run.data.packing == "first_fit" or run.training.on_pairs:
        return _packed(run, corpora, check=check)
    if run.data.order == "megatron":
        return _megatron(run, corpora, train_samples, check=check)
    return _stateless(run, corpora)


def _stateless(run: RunConfig, corpora: Sequence[IndexedDataset]) -> list[TokenDataset | None]:
    s, v, weights = run.model.seq_length, run.model.vocab_size, run.data.weights
    ranges = [split_positions(c, run.data.split, s) for c in corpora]
    made: list[TokenDataset | None] = []
    for index, split in enumerate(SPLITS):
        parts: list[GPTDataset] = []
        shares: list[float] = []
        for i, corpus in enumerate(corpora):
            start, stop = ranges[i][index]
            if stop - start <= s:
                if split == "train":
                    raise too_small(corpus.prefix, stop - start, s)
                continue
            parts.append(GPTDataset(corpus, seq_length=s, vocab_size=v, start=start, stop=stop,
                                    documents=within_documents(run)))
            shares.append(weights[i] if weights else float(stop - start))
        made.append(_joined(parts, shares))
    return made


def _packed(run: RunConfig, corpora: Sequence[IndexedDataset], *, check: bool) -> list[TokenDataset | None]:
    pairs = run.training.on_pairs
    ranges = [document_splits(c, run.data.split, unit=1 + pairs) for c in corpora]
    references = [read_reference(c) for c in corpora] if pairs else []
    made: list[TokenDataset | None] = []
    for index, split in enumerate(SPLITS):
        parts: list[PackedDataset] = []
        shares: list[float] = []
        for i, corpus in enumerate(corpora):
            first, end = ranges[i][index]
            if split != "train" and corpus.document_start(first) == corpus.document_start(end):
                continue
            s, v = run.model.seq_length, run.model.vocab_size
            parts.append(PairDataset(
                corpus, references[i], first=first, end=end, seq_length=s, vocab_size=v
            ) if pairs else PackedDataset(
                corpus, first=first, end=end, seq_length=s, vocab_size=v, cache=index_folder(run), check=check,
            ))
            shares.append(run.data.weights[i] if run.data.weights else float(parts[-1].tokens))
        made.append(_joined(parts, shares))
    return made


def _joined(parts: Sequence[TokenDataset], shares: Sequence[float]) -> TokenDataset | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    return BlendedDataset(parts, shares)


def _megatron(run: RunConfig, corpora: Sequence[IndexedDataset], train_samples: int, *,
              check: bool = False) -> list[TokenDataset | None]:
    s, cache = run.model.seq_length, index_folder(run)
    ranges = [mo.split_ranges(run.data.split, c.num_sequences) for c in corpora]
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
            wanted = list(mo.blend_sizes(weights, train_samples)) if len(usable) > 1 else [train_samples]
        parts = [MegatronGPTDataset(corpora[i], first=ranges[i][index][0], end=ranges[i][index][1], seq_length=s,
                                    vocab_size=run.model.vocab_size, num_samples=n, seed=run.seed, cache=cache,
                                    check=check, documents=within_documents(run))
                 for i, n in zip(usable, wanted)]
        if split == "train" and len(parts) > 1:
            key = content_key("blend", 1, weights, train_samples)
            # Bound now: it is called at the first sample, when the loop's names belong to another split.
            build = partial(mo.build_blend, weights, train_samples)
            order = partial(cached_arrays, cache, key, ("corpus", "sample"), build, check=check)
            made.append(BlendedDataset(parts, weights, order=order))
        else:
            made.append(_joined(parts, weights))
    return made


def drawn_samples(run: RunConfig, train_samples: int | None) -> int:
    """Return the samples that the whole run consumes; without ``train_samples`` right only without a ramp-up."""
    return train_samples or run.training.steps * run.batch.global_batch_size


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
        if isinstance(dataset, BlendedDataset):
            _ = dataset.given
        for part in parts:
            if isinstance(part, MegatronGPTDataset):
                made = part.indices
                size = sum(a.nbytes for a in (made.document, made.sample, made.shuffle))
                lines.append(f"{split:5} {part.data.prefix}: {len(part)} samples, {size} bytes")
            elif isinstance(part, PackedDataset):
                lines.append(f"{split:5} {part.data.prefix}: {part.describe()}")
    return lines
