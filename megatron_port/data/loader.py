"""Loaders that turn datasets into the micro-batches of a step. The only state is the number of consumed samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_port.config.schema import RunConfig
from megatron_port.data import megatron_order as mo
from megatron_port.data.batch import MicroBatch
from megatron_port.data.dataset import (
    BlendedDataset,
    GPTDataset,
    MegatronGPTDataset,
    SyntheticDataset,
    TokenDataset,
    split_positions,
    too_small,
)
from megatron_port.data.fingerprint import check_tokenizers, data_fingerprint
from megatron_port.data.format import tokenizer_name
from megatron_port.data.index_cache import cached_arrays, content_key
from megatron_port.data.indexed import CorpusMeta, IndexedDataset, meta_path
from megatron_port.data.order import derive
from megatron_port.data.plugin_source import plugin_datasets
from megatron_port.data.remote import ReadAhead, RemoteCache
from megatron_port.errors import DataError
from megatron_port.parallel.positions import WHOLE_SEQUENCE, SequencePartition
from megatron_port.registry import SOURCES

SPLITS = ("train", "valid", "test")


class StepLoader:
    """Micro-batches of one replica; a function of the sample number, so resuming needs no saved state.

    Args:
        dp_rank, dp_size: this replica, and how many there are.
        eod_id: end-of-document id; with ``mask_eod_loss`` the prediction made from it
            (the first token of an unrelated document) is left out of the loss, as in Megatron-LM.
        need_tokens, need_labels: what this pipeline stage consumes; with neither, nothing is read.
        partition: which positions of a sequence this rank holds; tokens, labels and masks are of these.
        remote: a corpus lies in a store; the samples of the step that follows are read beside training.
    """

    def __init__(self, dataset: TokenDataset, *, seq_length: int, micro_batch_size: int, dp_rank: int, dp_size: int,
                 seed: int, eod_id: int, mask_eod_loss: bool, need_tokens: bool, need_labels: bool,
                 partition: SequencePartition = WHOLE_SEQUENCE, remote: bool = False) -> None:
        if not 0 <= dp_rank < dp_size or micro_batch_size < 1:
            raise ValueError(f"replica {dp_rank} of {dp_size}, micro-batch {micro_batch_size}")
        self.dataset, self.seq_length, self.seed = dataset, seq_length, seed
        self.micro_batch_size, self.dp_rank, self.dp_size = micro_batch_size, dp_rank, dp_size
        self.eod_id, self.mask_eod_loss = eod_id, mask_eod_loss
        self.need_tokens, self.need_labels = need_tokens, need_labels
        self.positions = partition.held(seq_length)
        self.ahead = ReadAhead(lambda k: dataset.draw(seed, k)) if remote else None

    def sample_ids(self, first_sample: int, global_batch: int) -> list[tuple[int, ...]]:
        """Return the sample numbers of each micro-batch: n + (m·D + d)·b + i."""
        b, replicas = self.micro_batch_size, self.dp_size
        if global_batch < 1 or global_batch % (b * replicas):
            raise DataError(f"a global batch of {global_batch} does not divide into micro-batches of {b} on "
                            f"{replicas} replicas; make it a multiple of {b * replicas}")
        starts = [first_sample + (m * replicas + self.dp_rank) * b for m in range(global_batch // (b * replicas))]
        return [tuple(range(start, start + b)) for start in starts]

    def step(self, first_sample: int, global_batch: int) -> list[MicroBatch]:
        """Return the micro-batches of the step that consumes samples [first_sample, first_sample + global_batch).

        Raises:
            DataError: a token that the model has no embedding for; a batch that does not divide.
        """
        step = [self._pack(ids, [self.dataset.draw(self.seed, k) for k in ids] if self._reads else [])
                for ids in self.sample_ids(first_sample, global_batch)]
        if self.ahead and self._reads:
            self.ahead.read(k for ids in self.sample_ids(first_sample + global_batch, global_batch) for k in ids)
        return step

    def eval_batches(self, batches: int, global_batch: int) -> Iterator[list[MicroBatch]]:
        """Yield the first ``batches`` global batches in stored order, the same at each evaluation.

        Each sample counts once, whatever the batch and the replicas, and the last batch ends with the split's last
        sample. Masked samples fill it up to whole micro-batches on all replicas.
        """
        size, unit = len(self.dataset), self.micro_batch_size * self.dp_size
        for first in range(0, min(batches * global_batch, size), global_batch):
            count = min(global_batch, size - first)
            groups = self.sample_ids(first, -(-count // unit) * unit)
            # A mask on every replica or on none: the tokens that count are summed over those that have one.
            yield [self._pack(ids, [self._stored(k) for k in ids] if self._reads else [],
                              counted=min(max(first + count - ids[0], 0), len(ids)), masked=count % unit != 0)
                   for ids in groups]

    def _stored(self, index: int) -> np.ndarray:
        """A sample by its number in the split; zeros beyond the last."""
        if index < len(self.dataset):
            return self.dataset.sample(index)
        return np.zeros(self.seq_length + 1, dtype=np.int64)

    @property
    def _reads(self) -> bool:
        return self.need_tokens or self.need_labels

    def _pack(self, ids: tuple[int, ...], rows: Sequence[np.ndarray], *, counted: int | None = None,
              masked: bool = False) -> MicroBatch:
        """``counted``: of the rows, so many count (None: all). ``masked``: with a mask even where all do."""
        masked = masked or self.mask_eod_loss
        if not rows:
            return MicroBatch(sample_ids=ids, labels_masked=masked)
        both = torch.from_numpy(np.stack(rows))
        tokens = self.positions.take(both[:, :-1], dim=1).contiguous()
        mask: torch.Tensor | None = None
        if self.need_labels and masked:
            mask = (tokens != self.eod_id).float() if self.mask_eod_loss else torch.ones(tokens.shape)
            if counted is not None:
                mask[counted:] = 0.0
        return MicroBatch(sample_ids=ids, tokens=tokens if self.need_tokens else None,
                          labels=self.positions.take(both[:, 1:], dim=1).contiguous() if self.need_labels else None,
                          loss_mask=mask, labels_masked=masked)


@dataclass(frozen=True)
class Loaders:
    """Loaders of a run; None for a split without any sample."""

    train: StepLoader
    valid: StepLoader | None
    test: StepLoader | None
    tokenizer_name: str | None
    """None: synthetic tokens, or a corpus that does not say."""
    eod_id: int
    """-1: unknown."""
    tokenizer: dict[str, Any] = field(default_factory=dict)
    """Name, vocab_size, eod_id and hash, by the sidecars; empty: unknown."""
    data_fingerprint: list[dict[str, Any]] = field(default_factory=list)
    """Fingerprint of each corpus (``data.fingerprint``), for checkpoints."""

    def eval_batches(self, split: str, batches: int, global_batch: int) -> Iterator[list[MicroBatch]]:
        """Return sequential batches of ``valid`` or ``test``. Raises DataError where the split is empty."""
        loader = {"train": self.train, "valid": self.valid, "test": self.test}[split]
        if loader is None:
            raise DataError(f"data.split leaves no sample for {split}; give it a larger share or use a larger corpus")
        return loader.eval_batches(batches, global_batch)


def _tokenizer(run: RunConfig, corpora: Sequence[IndexedDataset]) -> tuple[str | None, int, dict[str, Any]]:
    """(name, eod id, identity) that the sidecars agree on. DataError: they do not, or the model is too small."""
    metas: list[tuple[IndexedDataset, CorpusMeta]] = [(c, c.meta) for c in corpora if c.meta is not None]
    for corpus, meta in metas:
        if meta.vocab_size > run.model.vocab_size:
            raise DataError(f"{meta_path(corpus.prefix)}: tokenizer {meta.tokenizer} has {meta.vocab_size} ids, the "
                            f"model {run.model.vocab_size}; set model.vocab_size = {meta.vocab_size}")
    # By hash where all have one: the same tokenizer lies beside each corpus that it made, under another name.
    hashed = all(meta.tokenizer_hash for _, meta in metas)
    if len({(meta.tokenizer_hash if hashed else meta.tokenizer, meta.eod_id) for _, meta in metas}) > 1:
        raise DataError("data.train: corpora of different tokenizers cannot be blended: "
                        + ", ".join(f"{c.prefix} ({m.tokenizer}, hash {m.tokenizer_hash[:12] or 'unknown'}, eod "
                                    f"{m.eod_id})" for c, m in metas))
    asked = run.data.tokenizer
    if metas:
        corpus, meta = metas[0]
        if asked not in ("auto", meta.tokenizer):
            _check_asked(asked, corpus, meta)
        found = {"name": meta.tokenizer, "vocab_size": meta.vocab_size, "eod_id": meta.eod_id}
        return tokenizer_name(corpus.prefix, meta), meta.eod_id, {**found, "hash": meta.tokenizer_hash}
    if asked != "auto":
        from megatron_port.data.tokenizer import get_tokenizer, identity_of
        tokenizer = get_tokenizer(asked)
        return asked, tokenizer.eod_id, identity_of(tokenizer)
    if run.data.mask_eod_loss:
        raise DataError(f"data.mask_eod_loss: {corpora[0].prefix} has no sidecar that names its end-of-document id; "
                        "set data.tokenizer")
    return None, -1, {}


def _check_asked(asked: str, corpus: IndexedDataset, meta: CorpusMeta) -> None:
    """``data.tokenizer`` is not the sidecar's name; only a hash can say that it is the same. Raises DataError."""
    from megatron_port.data.tokenizer import NAMES, identity

    if asked in NAMES or meta.tokenizer in NAMES or identity(asked)["hash"] != meta.tokenizer_hash:
        raise DataError(f"data.tokenizer is {asked}, but {corpus.prefix} was made with {meta.tokenizer}; "
                        "set data.tokenizer = \"auto\" or prepare the corpus again")


def open_corpora(run: RunConfig) -> list[IndexedDataset]:
    """Open the corpora of ``data.train``; what is remote is kept below ``data.remote_cache``."""
    data = run.data
    cache = RemoteCache(data.remote_cache or str(index_folder(run)), int(data.remote_cache_gb * 1e9))
    return [IndexedDataset(prefix, cache) for prefix in data.train]


def index_folder(run: RunConfig) -> Path:
    """Return the folder of the sample indices of Megatron's order."""
    return Path(run.data.index_cache) if run.data.index_cache else Path(run.output_dir) / "data_cache"


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
            parts.append(GPTDataset(corpus, seq_length=s, vocab_size=v, start=start, stop=stop))
            shares.append(weights[i] if weights else float(stop - start))
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
                                    check=check)
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


def build_loaders(run_config: RunConfig, *, dp_rank: int, dp_size: int, need_tokens: bool, need_labels: bool,
                  train_samples: int | None = None, partition: SequencePartition = WHOLE_SEQUENCE) -> Loaders:
    """Return the loaders of a run for one replica and stage, with the positions that ``partition`` gives this rank.

    ``train_samples``: samples that the whole run consumes; only Megatron's order depends
    on it (default: training.steps · global_batch_size, right without a ramp-up).

    Raises:
        DataError: no corpus, a damaged one, one too small for a sample, or of another tokenizer; a plugin's source
            without samples.
    """
    run, data = run_config, run_config.data
    name: str | None = None
    eod = -1
    tokenizer: dict[str, Any] = {}
    fingerprint: list[dict[str, Any]] = []
    remote = False
    sets: list[TokenDataset | None]
    if data.source in SOURCES.added:
        sets = plugin_datasets(run, SPLITS)
    elif data.synthetic:
        sets = [SyntheticDataset(seq_length=run.model.seq_length, vocab_size=run.model.vocab_size,
                                 seed=derive(run.seed, index)) for index in range(len(SPLITS))]
    else:
        if not data.train:
            raise DataError("data.train is empty; name the prefixes of .bin/.idx pairs, or set data.synthetic = true")
        if data.weights and len(data.weights) != len(data.train):
            raise DataError(f"data.weights: {len(data.weights)} weights for {len(data.train)} corpora; "
                            "give one for each, or none")
        corpora = open_corpora(run)
        remote = any(corpus.remote for corpus in corpora)
        name, eod, tokenizer = _tokenizer(run, corpora)
        fingerprint = data_fingerprint(corpora)
        if dp_rank == 0 and need_tokens:  # a few ranks are enough, and files are not read by thousands
            check_tokenizers(corpora)
        if data.order == "megatron":
            total = train_samples or run.training.steps * run.batch.global_batch_size
            sets = _megatron(run, corpora, total)
        else:
            sets = _stateless(run, corpora)
        if run.training.eval_batches and sets[1] is None:
            raise DataError(f"data.split = {list(data.split)} leaves validation without a sample of "
                            f"{run.model.seq_length + 1} tokens; use a larger share, a larger corpus, or "
                            "training.eval_batches = 0")
    loaders = [None if d is None else StepLoader(
        d, seq_length=run.model.seq_length, micro_batch_size=run.batch.micro_batch_size, dp_rank=dp_rank,
        dp_size=dp_size, seed=run.seed, eod_id=eod, mask_eod_loss=data.mask_eod_loss,
        need_tokens=need_tokens, need_labels=need_labels, partition=partition, remote=remote) for d in sets]
    assert loaders[0] is not None, "the training split was checked above"
    return Loaders(train=loaders[0], valid=loaders[1], test=loaders[2], tokenizer_name=name, eod_id=eod,
                   tokenizer=tokenizer, data_fingerprint=fingerprint)


def build_sample_index(run: RunConfig, *, train_samples: int | None = None) -> list[str]:
    """Build the indices of ``data.order = "megatron"``, or check existing ones; return a line for each part.

    Raises:
        DataError: as :func:`build_loaders`, or the folder cannot be written.
    """
    data = run.data
    if data.synthetic or data.order != "megatron":
        return [f'data.order = "{data.order}" keeps no index: sample k is computed from k']
    total = train_samples or run.training.steps * run.batch.global_batch_size
    corpora = open_corpora(run)
    lines = []
    for split, dataset in zip(SPLITS, _megatron(run, corpora, total, check=True)):
        parts = dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]
        if isinstance(dataset, BlendedDataset):
            _ = dataset.given
        for part in parts:
            if isinstance(part, MegatronGPTDataset):
                made = part.indices
                size = sum(a.nbytes for a in (made.document, made.sample, made.shuffle))
                lines.append(f"{split:5} {part.data.prefix}: {len(part)} samples, {size} bytes")
    return lines
