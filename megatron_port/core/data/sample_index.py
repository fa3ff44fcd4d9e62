"""Indices of a run's samples, built ahead of time: ``data index``."""

from __future__ import annotations

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data.dataset import BlendedDataset
from megatron_port.core.data.loader import SPLITS, corpus_datasets, drawn_samples, open_corpora
from megatron_port.core.data.megatron_order import MegatronBlend, MegatronGPTDataset
from megatron_port.core.data.packing import PackedDataset


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
