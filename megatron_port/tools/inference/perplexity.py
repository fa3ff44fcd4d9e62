"""Perplexity of a corpus, by an engine's ``eval_step``: any layout, either engine.

A stream of tokens is cut into windows of ``model.seq_length`` that begin every ``stride`` tokens; of each but the first
only the last ``stride`` predictions count, so every token but the very first is predicted exactly once. With a stride
below the window each has at least ``seq_length - stride`` tokens before it, at ``seq_length / stride`` times the cost.
What training leaves out of its loss, and what it does not let a token see, is left out here too: labels that a corpus'
mask does not count, and other documents under ``attention_documents = "within"``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.data.loader import RankView
from megatron_port.core.data.sample import Sample, document_starts
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.engine.api import Engine
from megatron_port.core.errors import DataError
from megatron_port.core.io.work import Advance, silent

Stream = Callable[[int, int], np.ndarray]
"""``stream(position, count)`` → something of so many tokens from a position on."""


class Samples(Protocol):
    """Samples in stored order: :class:`StreamWindows`, or a dataset of training."""

    def __len__(self) -> int: ...

    def sample(self, index: int) -> Sample:
        """Return sample ``index``."""

    def starts(self, index: int) -> np.ndarray | None:
        """Return the ``starts`` of sample ``index`` without reading its tokens."""


MICRO_BATCHES = 16
"""In one ``eval_step``."""


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of a corpus."""

    loss: float
    """Nats per token."""
    tokens: int
    """Predictions counted."""

    @property
    def perplexity(self) -> float:
        """Return exp(loss)."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def bits_per_byte(self, size: int) -> float:
        """Return bits per byte for a text of ``size`` bytes."""
        return self.loss * self.tokens / math.log(2) / size


def windows(tokens: int, seq_length: int, stride: int) -> int:
    """Return the number of windows over a stream of ``tokens``."""
    return 1 + max(0, -(-(tokens - 1 - seq_length) // stride))


def perplexity(
    engine: Engine, ctx: ParallelContext, samples: Samples, *, view: RankView, micro_batch_size: int,
    advance: Advance = silent,
) -> Perplexity:
    """Return the mean loss over the labels that count. Collective, the same on all ranks.

    Args:
        view: this rank's part of each micro-batch.
        advance: called with the samples that are done.

    Raises:
        DataError: an id that the model does not have, or no label counts.
    """
    total, counted, done = 0.0, 0, 0
    for step in sample_steps(samples, ctx, view, micro_batch_size):
        result = engine.eval_step(step)
        total, counted = total + result.loss_sum, counted + result.tokens
        done += len(step) * micro_batch_size * ctx.size("dp")
        advance(min(done, len(samples)), len(samples))
    if not counted:
        raise DataError("no token counts: all are masked, as those that an assistant has not written")
    return Perplexity(total / counted, counted)


@dataclass(frozen=True)
class StreamWindows:
    """Windows of a stream. Raises DataError: fewer than 2 tokens, or a stride beyond the window."""

    stream: Stream
    tokens: int
    seq_length: int
    vocab_size: int
    stride: int = 0
    """0: seq_length."""
    counted: Stream | None = None
    """bool [count]: whether tokens count as labels."""
    documents: Stream | None = None
    """int64: offsets at which documents start among the tokens."""

    def __post_init__(self) -> None:
        if self.tokens < 2:
            raise DataError(f"{self.tokens} tokens: at least 2 are needed, one to predict from and one to predict")
        if not 0 <= self.stride <= self.seq_length:
            raise DataError(f"a stride of {self.stride} is not between 1 and model.seq_length {self.seq_length}")

    @property
    def _step(self) -> int:
        return self.stride or self.seq_length

    def __len__(self) -> int:
        return windows(self.tokens, self.seq_length, self._step)

    def sample(self, index: int) -> Sample:
        start = index * self._step
        length = min(self.seq_length + 1, self.tokens - start)
        ids, counted = np.zeros(self.seq_length + 1, np.int64), np.zeros(self.seq_length, bool)
        found = self.stream(start, length)
        if int(found.max()) >= self.vocab_size or int(found.min()) < 0:
            raise DataError(
                f"the corpus has token {int(found.max())} near position {start}, the model has {self.vocab_size}; "
                "was it made with this model's tokenizer?"
            )
        ids[:length] = found
        new = slice(0 if index == 0 else self.seq_length - self._step, length - 1)
        counted[new] = True if self.counted is None else self.counted(start + 1, length - 1)[new]
        return Sample(ids, self.starts(index), counted)

    def starts(self, index: int) -> np.ndarray | None:
        if self.documents is None:
            return None
        start = index * self._step
        return document_starts(self.documents(start, min(self.seq_length, self.tokens - start)), self.seq_length)


def sample_steps(
    samples: Samples, ctx: ParallelContext, view: RankView, size: int
) -> Iterator[list[MicroBatch]]:
    """Yield the micro-batches of this replica, as many on each, :data:`MICRO_BATCHES` at a time; of samples beyond the
    last one, which fill up, nothing counts."""
    replicas, own = ctx.size("dp"), ctx.index("dp")
    rounds = -(-len(samples) // (size * replicas))
    for first in range(0, rounds, MICRO_BATCHES):
        yield [
            _micro_batch(samples, tuple((m * replicas + own) * size + i for i in range(size)), view)
            for m in range(first, min(first + MICRO_BATCHES, rounds))
        ]


def _micro_batch(samples: Samples, ids: tuple[int, ...], view: RankView) -> MicroBatch:
    """Return this rank's part of some samples; of those beyond the last one nothing counts."""
    here = [min(i, len(samples) - 1) for i in ids]
    if not view.reads:
        return view.micro_batch(ids, None, starts=map(samples.starts, here), labels_masked=True)
    drawn = [samples.sample(i) for i in here]
    both = np.stack([s.tokens for s in drawn])
    counts = torch.ones(len(ids), both.shape[1] - 1)
    for row, sample, index in zip(counts, drawn, ids):
        if index >= len(samples):
            row.zero_()
        elif sample.counted is not None:
            row *= torch.from_numpy(sample.counted)
    return view.micro_batch(ids, both, mask=counts, starts=(s.starts for s in drawn), labels_masked=True)
