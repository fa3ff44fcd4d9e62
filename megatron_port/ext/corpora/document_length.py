"""How long the documents are that attention sees: what its operations are counted by."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data.dataset import TokenDataset
from megatron_port.core.errors import DataError

SAMPLES = 512
"""Samples that are looked at, the first of the run."""


def mean_document_length(dataset: TokenDataset, seed: int) -> float:
    """Return the tokens of the document that a token is in, in the mean over the tokens of a run's first samples:
    Σ ℓ² ÷ Σ ℓ over the documents' parts within samples. Padding at a sample's end is a document. Reads the index alone.
    """
    squares = tokens = 0
    for k in range(min(SAMPLES, len(dataset))):
        starts = dataset.drawn_starts(seed, k)
        if starts is None:
            return 0.0
        lengths = np.diff(np.append(np.flatnonzero(np.diff(starts, prepend=-1)), len(starts)))
        squares, tokens = squares + int((lengths.astype(np.int64) ** 2).sum()), tokens + len(starts)
    return squares / tokens if tokens else 0.0


def document_length(config: RunConfig, dataset: TokenDataset) -> float:
    """Return the length that a run's attention is counted by; 0: it sees whole samples."""
    if config.data.attention_documents != "within":
        return 0.0
    return config.data.document_length or mean_document_length(dataset, config.seed)


def with_document_length(config: RunConfig) -> RunConfig:
    """Return the run with ``data.document_length``, as the index of its corpora says, where that is 0, attention stays
    within documents and the corpora are files that are here."""
    data = config.data
    if data.attention_documents != "within" or data.document_length or data.source != "corpus":
        return config
    # With torch, which a plan needs for this alone.
    from megatron_port.core.data.loader import corpus_datasets, drawn_samples, open_corpora, synthetic_datasets

    try:
        if data.synthetic:
            dataset = synthetic_datasets(config)[0]
        elif not data.train or any("://" in prefix for prefix in data.train):
            return config
        else:
            dataset = corpus_datasets(config, open_corpora(config), drawn_samples(config, None))[0]
    except DataError:
        return config  # a plan needs no corpus
    length = 0.0 if dataset is None else mean_document_length(dataset, config.seed)
    return replace(config, data=replace(data, document_length=length))
