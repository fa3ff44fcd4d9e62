"""Perplexity of a stream of tokens, by an engine's ``eval_step``: any layout, either engine.

The stream is cut into windows of ``model.seq_length`` tokens that begin every ``stride`` tokens; of each but the first
only the last ``stride`` predictions count, so every token but the very first is predicted exactly once. With a stride
below the window each has at least ``seq_length - stride`` tokens before it, at ``seq_length / stride`` times the cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from megatron_port.data.batch import MicroBatch
from megatron_port.engine.api import Engine
from megatron_port.errors import DataError
from megatron_port.parallel.context import ParallelContext

Stream = Callable[[int, int], np.ndarray]
"""``stream(position, count)`` → so many token ids from a position on."""
MICRO_BATCHES = 16
"""In one ``eval_step``."""


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of a whole stream."""

    loss: float
    """Nats a token."""
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
    engine: Engine, ctx: ParallelContext, stream: Stream, tokens: int, *, seq_length: int, vocab_size: int,
    micro_batch_size: int, stride: int = 0,
) -> Perplexity:
    """Return the mean loss over ``tokens`` of a stream. Collective, the same on all ranks. ``stride`` 0: seq_length.

    Raises:
        DataError: fewer than 2 tokens, a stride beyond the window, or an id that the model does not have.
    """
    stride = stride or seq_length
    if tokens < 2:
        raise DataError(f"{tokens} tokens: at least 2 are needed, one to predict from and one to predict")
    if not 1 <= stride <= seq_length:
        raise DataError(f"a stride of {stride} is not between 1 and model.seq_length {seq_length}")
    total, counted = 0.0, 0
    cut = _Cut(stream, tokens, seq_length, stride, vocab_size)
    for step in _steps(cut, ctx, micro_batch_size):
        result = engine.eval_step(step)
        total, counted = total + result.loss_sum, counted + result.tokens
    if counted != tokens - 1:
        raise DataError(f"{counted} predictions were counted, the stream has {tokens - 1}")
    return Perplexity(total / counted, counted)


@dataclass(frozen=True)
class _Cut:
    """Windows of a stream."""

    stream: Stream
    tokens: int
    seq_length: int
    stride: int
    vocab_size: int

    def row(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (seq + 1 ids, seq counts); beyond the last window nothing counts."""
        ids, counts = np.zeros(self.seq_length + 1, np.int64), np.zeros(self.seq_length, np.float32)
        start = window * self.stride
        length = min(self.seq_length + 1, self.tokens - start)
        if window >= windows(self.tokens, self.seq_length, self.stride) or length < 2:
            return ids, counts
        found = self.stream(start, length)
        if int(found.max()) >= self.vocab_size or int(found.min()) < 0:
            raise DataError(
                f"the corpus has token {int(found.max())} near position {start}, the model has {self.vocab_size}; "
                "was it made with this model's tokenizer?"
            )
        ids[:length] = found
        counts[0 if window == 0 else self.seq_length - self.stride : length - 1] = 1.0
        return ids, counts


def _steps(cut: _Cut, ctx: ParallelContext, size: int) -> Iterator[list[MicroBatch]]:
    """Micro-batches of this replica, as many on each, :data:`MICRO_BATCHES` at a time."""
    replicas, own = ctx.size("dp"), ctx.index("dp")
    count = windows(cut.tokens, cut.seq_length, cut.stride)
    rounds = -(-count // (size * replicas))
    for first in range(0, rounds, MICRO_BATCHES):
        out = []
        for m in range(first, min(first + MICRO_BATCHES, rounds)):
            ids = tuple((m * replicas + own) * size + i for i in range(size))
            drawn = [cut.row(i) for i in ids] if ctx.is_first_stage or ctx.is_last_stage else []
            both = torch.from_numpy(np.stack([r for r, _ in drawn])) if drawn else None
            counts = torch.from_numpy(np.stack([c for _, c in drawn])) if drawn else None
            out.append(MicroBatch(
                ids,
                tokens=both[:, :-1].contiguous() if both is not None and ctx.is_first_stage else None,
                labels=both[:, 1:].contiguous() if both is not None and ctx.is_last_stage else None,
                loss_mask=counts if ctx.is_last_stage else None, labels_masked=True,
            ))
        yield out
