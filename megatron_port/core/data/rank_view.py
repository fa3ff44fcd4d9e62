"""What a rank is given of each micro-batch: by its pipeline stage, and by its place among the context-parallel ranks.

Labels, masks and the objective's side tensors are made of whole samples, and the positions that the rank holds are
taken afterwards: the label of a position at the edge of a chunk is another rank's token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data.balance import attention_work, balanced_chunks, block_size
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.data.objective import Objective, WholeSamples, objective_of
from megatron_port.core.data.sample import Sample
from megatron_port.core.dist.context import ParallelContext
from megatron_port.core.dist.positions import WHOLE_SEQUENCE, Division, SequencePartition, sequence_partition


def balanced_windows(config: RunConfig) -> tuple[int, ...]:
    """Return the attention window of each layer (0: none) where each micro-batch has a division of its own, by its
    documents (``layout.cp_order``); empty where it has not: a sample of one document costs zigzag's ranks the same."""
    model = config.model
    if config.layout.cp_order != "balanced" or config.data.attention_documents != "within":
        return ()
    return tuple(model.window_of(layer) for layer in range(model.num_layers + model.mtp_layers))


@dataclass(frozen=True)
class RankView:
    """One rank's part of micro-batches.

    Args:
        need_tokens, need_labels: what its pipeline stage consumes.
        partition: which positions of a sequence it holds.
        windows: of the layers, where each micro-batch is divided by the work that its documents leave (empty: all are
            divided as ``partition`` says).
        objective: makes what the last stage's loss needs beside labels.
    """

    need_tokens: bool
    need_labels: bool
    partition: SequencePartition = WHOLE_SEQUENCE
    windows: tuple[int, ...] = ()
    objective: Objective = field(default_factory=Objective)

    @classmethod
    def of(
        cls, config: RunConfig, *, need_tokens: bool, need_labels: bool, partition: SequencePartition = WHOLE_SEQUENCE
    ) -> RankView:
        """Return the view of a rank that a run's stage and division give these."""
        windows = balanced_windows(config) if partition.division.ranks > 1 else ()
        return cls(need_tokens, need_labels, partition, windows, objective_of(config))

    @classmethod
    def on(cls, config: RunConfig, ctx: ParallelContext) -> RankView:
        """Return the view of this rank of a run."""
        partition = sequence_partition(ctx.mesh, ctx.rank, order=config.layout.cp_order)
        return cls.of(config, need_tokens=ctx.is_first_stage, need_labels=ctx.is_last_stage, partition=partition)

    @property
    def reads(self) -> bool:
        """Whether the stage consumes tokens or labels."""
        return self.need_tokens or self.need_labels

    def division(self, starts: np.ndarray | None) -> Division | None:
        """Return how sequences with these document starts, int32 [batch, seq], are divided; None: as ever.

        A function of the starts alone, which every rank and stage has: all find the same.
        """
        if not self.windows or starts is None:
            return None
        ranks, seq_length = self.partition.division.ranks, starts.shape[1]
        work = attention_work(starts, self.windows).reshape(-1, block_size(seq_length, ranks)).sum(axis=1)
        return Division(len(work), balanced_chunks(work, ranks))

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
        division = self.division(documents)
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
