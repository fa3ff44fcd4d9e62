"""Samples that are pairs of answers: the chosen conversation, then the rejected one, each a document of its own.

Attention stays within a document, so neither answer sees the other, and where the second one starts tells them apart on
every stage. A pair is never cut, and is in one sample, so that its loss is a function of that sample alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from megatron_port.core.data.indexed import IndexedDataset
from megatron_port.core.data.packing import PackedDataset, PackedIndices
from megatron_port.core.data.sample import Sample
from megatron_port.core.errors import DataError
from megatron_port.ext.objectives.reference_losses import Reference


class PairDataset(PackedDataset):
    """Documents [first, end) of a corpus of preferences, two in each sample; each epoch a permutation of the pairs.

    ``reference``: of all documents of the corpus.

    Raises:
        DataError: no pair in this split, or one that is longer than a sample; on reading, an id that is not below
            ``vocab_size``.
    """

    def __init__(
        self, data: IndexedDataset, reference: Reference, *, first: int, end: int, seq_length: int, vocab_size: int
    ) -> None:
        super().__init__(
            data, first=first, end=end, seq_length=seq_length, vocab_size=vocab_size, cache=Path()
        )
        self.reference = reference.sums[first:end].reshape(-1, 2)
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
        return Sample(found.tokens, found.starts, found.counted, self.reference[index])


def check_pairs(corpora: Sequence[IndexedDataset]) -> None:
    """Check that corpora hold pairs.

    Raises:
        DataError: one does not, or is in a store.
    """
    for corpus in corpora:
        pairs = corpus.meta.pairs if corpus.meta is not None else 0
        if not pairs:
            raise DataError(
                f'{corpus.name}: training.loss "dpo" takes pairs of answers, and this corpus has none; make one with '
                "`data prepare --preference`"
            )
        if corpus.remote or pairs * 2 != corpus.num_documents:
            raise DataError(
                f"{corpus.name}: copy the corpus to a disk; the log-probabilities of its answers lie beside it" if
                corpus.remote else f"{corpus.name}: {corpus.num_documents} documents of {pairs} pairs; prepare it again"
            )
