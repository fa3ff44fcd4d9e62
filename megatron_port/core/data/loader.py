"""Loaders that turn datasets into the micro-batches of a step. The only state is the number of consumed samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.data.dataset import (
    BlendedDataset,
    GPTDataset,
    Sample,
    SyntheticDataset,
    TokenDataset,
    derive,
    split_positions,
    too_small,
)
from megatron_port.core.data.indexed import IndexedDataset, RemoteCache, check_local, data_fingerprint, open_all
from megatron_port.core.data.objective import Objective, WholeSamples, objective_of
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.positions import WHOLE_SEQUENCE, Division, SequencePartition, sequence_partition
from megatron_port.core.errors import DataError
from megatron_port.core.registry import PARTS, SAMPLES

# What a rank is given of each micro-batch: by its pipeline stage, and by its place among the context-parallel ranks.
#
# Labels, masks and the objective's side tensors are made of whole samples, and the positions that the rank holds are
# taken afterwards: the label of a position at the edge of a chunk is another rank's token.

@dataclass(frozen=True)
class RankView:
    """One rank's part of micro-batches.

    Args:
        need_tokens, need_labels: what its pipeline stage consumes.
        partition: which positions of a sequence it holds.
        divide: how each micro-batch is divided, by its document starts, int32 [batch, seq]; None: all are divided as
            ``partition`` says.
        objective: makes what the last stage's loss needs beside labels.
    """

    need_tokens: bool
    need_labels: bool
    partition: SequencePartition = WHOLE_SEQUENCE
    divide: Callable[[np.ndarray], Division] | None = None
    objective: Objective = field(default_factory=Objective)

    @classmethod
    def of(
        cls, config: RunConfig, *, need_tokens: bool, need_labels: bool, partition: SequencePartition = WHOLE_SEQUENCE
    ) -> RankView:
        """Return the view of a rank that a run's stage and division give these."""
        ranks, divide = partition.division.ranks, None
        if ranks > 1:
            divide = PARTS.function("balanced context-parallel divisions")(config, ranks)
        return cls(need_tokens, need_labels, partition, divide, objective_of(config))

    @classmethod
    def on(cls, config: RunConfig, ctx: ParallelContext) -> RankView:
        """Return the view of this rank of a run."""
        partition = sequence_partition(ctx.mesh, ctx.rank, order=config.layout.cp_order)
        return cls.of(config, need_tokens=ctx.is_first_stage, need_labels=ctx.is_last_stage, partition=partition)

    @property
    def reads(self) -> bool:
        """Whether the stage consumes tokens or labels."""
        return self.need_tokens or self.need_labels

    def micro_batch(
        self, ids: tuple[int, ...], tokens: np.ndarray | None, *, mask: torch.Tensor | None = None,
        starts: Iterable[np.ndarray | None] = (), labels_masked: bool = False, rows: Sequence[Sample] = (),
        training: bool = False,
    ) -> MicroBatch:
        """Return the rank's part of some samples.

        Args:
            tokens: int64 [batch, seq + 1]; None on stages that read none.
            mask: float32 [batch, seq]: which labels count; None: all, or another stage knows.
            starts: of each sample, int32 [seq]; none where a sample is one document.
            rows: the samples as a dataset has them, for the objective; empty: they come from none.
            training: they are trained on, not evaluated.
        """
        found = [row for row in starts if row is not None]
        documents = np.stack(found) if found else None
        division = None if self.divide is None or documents is None else self.divide(documents)
        partition = self.partition.divided(division)
        whole = None if documents is None else torch.from_numpy(documents)
        if tokens is None:
            return MicroBatch(ids, labels_masked=labels_masked, document_starts=whole, division=division)

        def held(x: torch.Tensor) -> torch.Tensor:
            """Take the rank's positions of [batch, seq, …]."""
            return partition.held(x.shape[1]).take(x, dim=1).contiguous()

        read, labels = torch.from_numpy(tokens[:, :-1]), torch.from_numpy(tokens[:, 1:])
        mask = mask if self.need_labels else None
        side = self.objective.side(WholeSamples(
            ids, labels, mask, whole, rows=rows, training=training, divided=partition.division.ranks > 1
        )) if self.need_labels else {}
        layout = self.objective.side_layout
        return MicroBatch(
            ids, tokens=held(read) if self.need_tokens else None, labels=held(labels) if self.need_labels else None,
            loss_mask=None if mask is None else held(mask), labels_masked=labels_masked, document_starts=whole,
            division=division,
            side={name: held(x) if layout[name] == "position" else x for name, x in side.items()},
        )


# Datasets of a run's splits: which documents are for training, validation and test, and in which order.

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
    objective = objective_of(run)
    objective.check_corpora(corpora)
    packed = run.data.packing == "first_fit" or objective.documents_of_sample > 0
    make = SAMPLES.function("first_fit" if packed else run.data.order)
    made: list[TokenDataset | None] = make(run, corpora, train_samples, check=check)
    return made


def stateless_samples(
    run: RunConfig, corpora: Sequence[IndexedDataset], train_samples: int, *, check: bool = False
) -> list[TokenDataset | None]:
    """Return the dataset of each split, whose sample k is computed from k. Raises DataError: a corpus is too small."""
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
        made.append(joined(parts, shares))
    return made


def joined(parts: Sequence[TokenDataset], shares: Sequence[float]) -> TokenDataset | None:
    """Return the blend of datasets; None where there are none."""
    if len(parts) < 2:
        return parts[0] if parts else None
    return BlendedDataset(parts, shares)


def drawn_samples(run: RunConfig, train_samples: int | None) -> int:
    """Return the samples that the whole run consumes; without ``train_samples`` right only without a ramp-up."""
    return train_samples or run.training.steps * run.batch.global_batch_size


class ReplicaShare(NamedTuple):
    """Share of a replica in a step: micro-batches ``rank``, ``rank`` + ``size`` … of ``micro_batch_size`` samples."""

    micro_batch_size: int
    rank: int = 0
    size: int = 1


class StepLoader:
    """Micro-batches of one replica; a function of the sample number, so resuming needs no saved state.

    Args:
        share: this replica's part of a step.
        eod_id: end-of-document id where the prediction made from it (the first token of an unrelated document) is left
            out of the loss, as in Megatron-LM; None: it counts.
        view: this rank's part of each micro-batch; no token is read where it has none.
        documents: the dataset's samples say where their documents start, which every stage is told.
        remote: a corpus is in a store; the samples of the step that follows are read beside training.
    """

    def __init__(
        self, dataset: TokenDataset, share: ReplicaShare, *, seq_length: int, seed: int, view: RankView,
        eod_id: int | None = None, documents: bool = False, remote: bool = False,
    ) -> None:
        self.micro_batch_size, self.dp_rank, self.dp_size = share
        if not 0 <= self.dp_rank < self.dp_size or self.micro_batch_size < 1:
            raise ValueError(f"replica {self.dp_rank} of {self.dp_size}, micro-batch {self.micro_batch_size}")
        self.dataset, self.seq_length, self.seed, self.eod_id = dataset, seq_length, seed, eod_id
        self.view, self.documents = view, documents
        self.ahead = PARTS.function("prefetch of remote corpora")(lambda k: dataset.draw(seed, k)) if remote else None

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
        read, starts = partial(self.dataset.draw, self.seed), partial(self.dataset.drawn_starts, self.seed)
        step = [self._pack(ids, read, starts, training=True) for ids in self.sample_ids(first_sample, global_batch)]
        if self.ahead and self.view.reads:
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
            yield [self._pack(ids, self._stored, self._stored_starts,
                              counted=min(max(first + count - ids[0], 0), len(ids)), masked=count % unit != 0)
                   for ids in groups]

    def _stored(self, index: int) -> Sample:
        """A sample by its number in the split; zeros, one document, beyond the last."""
        if index < len(self.dataset):
            return self.dataset.sample(index)
        return Sample(np.zeros(self.seq_length + 1, dtype=np.int64), self._stored_starts(index))

    def _stored_starts(self, index: int) -> np.ndarray | None:
        if index < len(self.dataset):
            return self.dataset.starts(index)
        return np.zeros(self.seq_length, dtype=np.int32) if self.documents else None

    def _pack(
        self, ids: tuple[int, ...], read: Callable[[int], Sample], starts: Callable[[int], np.ndarray | None], *,
        counted: int | None = None, masked: bool = False, training: bool = False,
    ) -> MicroBatch:
        """Make a micro-batch of the samples ``ids``.

        Args:
            read, starts: give a sample by its number, and where its documents start without reading its tokens.
            counted: of the samples, so many count (None: all).
            masked: with a mask even where all do.
            training: they are trained on, not evaluated.
        """
        masked = masked or self.eod_id is not None or self.dataset.masked
        if not self.view.reads:
            return self.view.micro_batch(ids, None, starts=map(starts, ids) if self.documents else (),
                                         labels_masked=masked)
        rows = [read(k) for k in ids]
        tokens = np.stack([row.tokens for row in rows])
        mask = self._mask(rows, tokens, counted) if self.view.need_labels and masked else None
        return self.view.micro_batch(ids, tokens, mask=mask, labels_masked=masked, rows=rows, training=training,
                                     starts=(row.starts for row in rows) if self.documents else ())

    def _mask(self, rows: Sequence[Sample], tokens: np.ndarray, counted: int | None) -> torch.Tensor:
        """Return which labels of the samples count, float32 [batch, seq]."""
        read = torch.from_numpy(tokens[:, :-1])
        mask = (read != self.eod_id).float() if self.eod_id is not None else torch.ones(read.shape)
        if self.dataset.masked:
            all_count = np.ones(self.seq_length, dtype=bool)
            mask *= torch.from_numpy(np.stack([all_count if row.counted is None else row.counted for row in rows]))
        if counted is not None:
            mask[counted:] = 0.0
        return mask


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
    """Fingerprint of each corpus (``data.indexed``), for checkpoints."""

    def eval_batches(self, split: str, batches: int, global_batch: int) -> Iterator[list[MicroBatch]]:
        """Return sequential batches of ``valid`` or ``test``. Raises DataError where the split is empty."""
        loader = {"train": self.train, "valid": self.valid, "test": self.test}[split]
        if loader is None:
            raise DataError(f"data.split leaves no sample for {split}; give it a larger share or use a larger corpus")
        return loader.eval_batches(batches, global_batch)


def build_loaders(run_config: RunConfig, *, dp_rank: int, dp_size: int, need_tokens: bool, need_labels: bool,
                  train_samples: int | None = None, partition: SequencePartition = WHOLE_SEQUENCE) -> Loaders:
    """Return the loaders of a run for one replica and stage, with the positions that ``partition`` gives this rank.

    ``need_tokens``, ``need_labels``: what the stage consumes; with neither, no token is read. ``train_samples``:
    samples that the whole run consumes; only Megatron's order depends on it (default: training.steps ·
    global_batch_size, right without a ramp-up).

    Raises:
        DataError: no corpus, a damaged one, one too small for a sample, or of another tokenizer; a plugin's source
            without samples.
    """
    run, data = run_config, run_config.data
    view = RankView.of(run, need_tokens=need_tokens, need_labels=need_labels, partition=partition)
    name: str | None = None
    eod = -1
    tokenizer: dict[str, Any] = {}
    fingerprint: list[dict[str, Any]] = []
    remote = False
    sets: list[TokenDataset | None]
    if data.source != "corpus":
        sets = PARTS.function("plugin data source")(run, SPLITS)
    elif data.synthetic:
        sets = synthetic_datasets(run)
    else:
        if not data.train:
            raise DataError("data.train is empty; name the prefixes of .bin/.idx pairs, or set data.synthetic = true")
        if data.weights and len(data.weights) != len(data.train):
            raise DataError(f"data.weights: {len(data.weights)} weights for {len(data.train)} corpora; "
                            "give one for each, or none")
        corpora = open_corpora(run)
        remote = any(corpus.remote for corpus in corpora)
        name, eod, tokenizer = PARTS.function("corpus tokenizer")(run, corpora)
        fingerprint = data_fingerprint(corpora, view.objective.fingerprint_of)
        if dp_rank == 0 and need_tokens:  # a few ranks are enough, and files are not read by thousands
            PARTS.function("tokenizer check")(corpora)
        sets = corpus_datasets(run, corpora, drawn_samples(run, train_samples))
        if run.training.eval_batches and sets[1] is None:
            raise DataError(f"data.split = {list(data.split)} leaves validation without a sample of "
                            f"{run.model.seq_length + 1} tokens; use a larger share, a larger corpus, or "
                            "training.eval_batches = 0")
    loaders = [None if d is None else StepLoader(
        d, ReplicaShare(run.batch.micro_batch_size, dp_rank, dp_size), seq_length=run.model.seq_length,
        seed=run.seed, eod_id=eod if data.mask_eod_loss else None, view=view, documents=within_documents(run),
        remote=remote) for d in sets]
    assert loaders[0] is not None, "the training split was checked above"
    consumed = run.training.steps * run.batch.global_batch_size if train_samples is None else train_samples
    view.objective.open_side(consumed, whole=dp_rank == 0 and need_labels)
    return Loaders(train=loaders[0], valid=loaders[1], test=loaders[2], tokenizer_name=name, eod_id=eod,
                   tokenizer=tokenizer, data_fingerprint=fingerprint)
