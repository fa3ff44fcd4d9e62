"""Datasets of a data source that a plugin registers (``data.source``), with every sample checked."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data.dataset import Sample, TokenDataset, document_starts
from megatron_port.core.errors import DataError
from megatron_port.core.registry import SOURCES


class PluginDataset(Protocol):
    """Result of a plugin's source: :class:`~megatron_port.core.data.dataset.TokenDataset`, or only this much of it.

    A sample is its ``seq_length + 1`` ids, int64, or a :class:`Sample` that also says where its documents start and
    which labels count. A source whose samples may have labels that do not count has ``masked = True``.
    """

    def __len__(self) -> int:
        """Samples in one epoch."""

    def sample(self, index: int) -> Sample | np.ndarray:
        """Return sample ``index`` in stored order."""

    def draw(self, seed: int, k: int) -> Sample | np.ndarray:
        """Return sample k of a training run, counted from its start."""


class CheckedDataset:
    """A plugin's dataset. Raises DataError where a sample is not what the model can read.

    ``documents``: samples say where their documents start; one that does not is one document.
    """

    def __init__(
        self, inner: PluginDataset, where: str, *, seq_length: int, vocab_size: int, documents: bool = False
    ) -> None:
        self._inner, self._where, self._seq_length, self._vocab_size = inner, where, seq_length, vocab_size
        self._documents = documents
        self.masked = bool(getattr(inner, "masked", False))

    def __len__(self) -> int:
        return len(self._inner)

    def sample(self, index: int) -> Sample:
        return self._checked(self._inner.sample(index), index)

    def draw(self, seed: int, k: int) -> Sample:
        return self._checked(self._inner.draw(seed, k), k)

    def starts(self, index: int) -> np.ndarray | None:
        """Return the ``starts`` of sample ``index``. A source need not give them by themselves: the sample is read."""
        return self.sample(index).starts if self._documents else None

    def drawn_starts(self, seed: int, k: int) -> np.ndarray | None:
        """Return the ``starts`` of sample k of a training run; as :meth:`starts`."""
        return self.draw(seed, k).starts if self._documents else None

    def _checked(self, given: Sample | np.ndarray, number: int) -> Sample:
        where, seq = f"{self._where}: sample {number}", self._seq_length
        sample = given if isinstance(given, Sample) else Sample(given)
        _check_array(sample.tokens, np.int64, seq + 1, where, "seq_length + 1 ids")
        low, high = int(sample.tokens.min()), int(sample.tokens.max())
        if low < 0 or high >= self._vocab_size:
            raise DataError(
                f"{where} has ids from {low} to {high}; model.vocab_size is {self._vocab_size}: ids are from 0 to "
                f"{self._vocab_size - 1}"
            )
        if sample.counted is not None:
            _check_array(sample.counted, np.bool_, seq, f"{where}: counted", "one for each label")
            if not self.masked:
                raise DataError(f"{where} says which labels count; its dataset must then have masked = True")
        starts = None
        if self._documents:
            starts = np.zeros(seq, dtype=np.int32) if sample.starts is None else sample.starts
            _check_array(starts, np.int32, seq, f"{where}: starts", "one for each position")
            edges = np.flatnonzero(starts == np.arange(seq))
            if not np.array_equal(starts, document_starts(edges, seq)):
                raise DataError(f"{where}: starts {starts.tolist()[:16]}: each position has that of its own document, "
                                "at which starts[i] is i")
        return replace(sample, starts=starts)


def _check_array(values: object, dtype: type[np.generic], length: int, where: str, what: str) -> None:
    if not isinstance(values, np.ndarray) or values.shape != (length,) or values.dtype != dtype:
        kind = f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray) else type(values).__name__
        raise DataError(f"{where} is {kind}; it must be a numpy array, {np.dtype(dtype)} {(length,)}: {what}")


def plugin_datasets(run: RunConfig, splits: tuple[str, ...]) -> list[TokenDataset | None]:
    """Return the dataset of each split; None where the source has none or it is empty.

    Raises:
        ConfigError: ``data.source`` is not registered.
        DataError: there is nothing to train on.
    """
    source = SOURCES.function(run.data.source)
    made: list[TokenDataset | None] = []
    for split in splits:
        inner = source(run, split)
        where = f'data.source "{run.data.source}", split {split}'
        if inner is None or not len(inner):
            if split == "train":
                raise DataError(f"{where}: no samples to train on")
            if split == "valid" and run.training.eval_batches:
                raise DataError(f"{where}: no samples to evaluate on; set training.eval_batches = 0")
            made.append(None)
            continue
        made.append(
            CheckedDataset(inner, where, seq_length=run.model.seq_length, vocab_size=run.model.vocab_size,
                           documents=run.data.attention_documents == "within")
        )
    return made
