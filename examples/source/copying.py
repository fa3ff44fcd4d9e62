"""A data source from outside the package: sequences whose second half repeats the first.

A model can predict the second half only by looking back (the "induction" task), so its loss falls to half of that of
guessing and no further. Nothing is stored: a sample is a function of its number, which is all that a source needs for
resuming and for drawing the same samples whatever the layout.
"""

import numpy as np

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.registry import SOURCES


class CopyingDataset:
    """``megatron_port.ext.corpora.plugin_source.PluginDataset``: samples of ``seq_length + 1`` ids, int64."""

    def __init__(self, seq_length: int, vocab_size: int, key: int) -> None:
        self.seq_length, self.vocab_size, self.key = seq_length, vocab_size, key

    def __len__(self) -> int:
        return 1 << 20

    def sample(self, index: int) -> np.ndarray:
        """Return sample ``index`` of the stored order, which evaluations read."""
        generator = np.random.Generator(np.random.Philox(key=[self.key, index]))
        half = generator.integers(self.vocab_size, size=self.seq_length // 2 + 1)
        return np.concatenate([half, half])[: self.seq_length + 1]

    def draw(self, seed: int, k: int) -> np.ndarray:
        """Return the k-th sample of a training run; the run's seed is in ``key``."""
        return self.sample(k)


def copying(config: RunConfig, split: str) -> CopyingDataset:
    """Return the samples of a split; each split has its own."""
    number = ("train", "valid", "test").index(split)
    return CopyingDataset(config.model.seq_length, config.model.vocab_size, 3 * config.seed + number)


SOURCES.add("copying", copying)
