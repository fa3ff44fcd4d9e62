"""Datasets of a data source that a plugin registers (``data.source``), with every sample checked."""

from __future__ import annotations

import numpy as np

from megatron_port.config.schema import RunConfig
from megatron_port.data.dataset import TokenDataset
from megatron_port.errors import DataError
from megatron_port.registry import SOURCES


class CheckedDataset:
    """A plugin's dataset. Raises DataError where a sample is not what the model can read."""

    def __init__(self, inner: TokenDataset, where: str, *, seq_length: int, vocab_size: int) -> None:
        self._inner, self._where, self._shape, self._vocab_size = inner, where, (seq_length + 1,), vocab_size

    def __len__(self) -> int:
        return len(self._inner)

    def sample(self, index: int) -> np.ndarray:
        return self._checked(self._inner.sample(index), index)

    def draw(self, seed: int, k: int) -> np.ndarray:
        return self._checked(self._inner.draw(seed, k), k)

    def _checked(self, tokens: np.ndarray, number: int) -> np.ndarray:
        where = f"{self._where}: sample {number}"
        if not isinstance(tokens, np.ndarray) or tokens.shape != self._shape or tokens.dtype != np.int64:
            kind = f"{tokens.dtype} {tokens.shape}" if isinstance(tokens, np.ndarray) else type(tokens).__name__
            raise DataError(f"{where} is {kind}; it must be a numpy array, int64 {self._shape}: seq_length + 1 ids")
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._vocab_size:
            raise DataError(
                f"{where} has ids from {int(tokens.min())} to {int(tokens.max())}; model.vocab_size is "
                f"{self._vocab_size}: ids are from 0 to {self._vocab_size - 1}"
            )
        return tokens


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
            CheckedDataset(inner, where, seq_length=run.model.seq_length, vocab_size=run.model.vocab_size)
        )
    return made
