"""Dropout whose mask is a function of (seed, step, global sample, op, global element).

The mask of a sample is the same whichever rank computes it, however the
sequence, the heads or the batch are split, and when a layer is recomputed. The
key of a micro-batch (its step and sample ids) is set by the engine before each
forward pass; recompute restores the key that the forward pass saw, because by
then the engine has moved on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch

from megatron_port.parallel.counter import key_of, random_bits


@dataclass(frozen=True)
class SampleKey:
    """What identifies the micro-batch in flight."""

    seed: int
    step: int
    sample_ids: tuple[int, ...]
    device: torch.device

    @cached_property
    def keys(self) -> torch.Tensor:
        """int64 [batch]: one key a sample, on the device. Made at the first dropout: a model without pays nothing."""
        keys = torch.tensor([key_of("sample", self.seed, self.step, i) for i in self.sample_ids], dtype=torch.int64)
        return keys.to(self.device, non_blocking=True)


class DropoutStream:
    """Dropout masks for one model on one rank. ``enabled`` is False during evaluation."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        self.device = device
        self.enabled = True
        self.current: SampleKey | None = None

    def set_micro_batch(self, step: int, sample_ids: Sequence[int]) -> None:
        """Say which samples the next forward pass works on."""
        self.current = SampleKey(self.seed, step, tuple(int(i) for i in sample_ids), self.device)

    @contextmanager
    def use(self, key: SampleKey | None) -> Iterator[None]:
        """Run with the key of an earlier forward pass (recompute)."""
        saved, self.current = self.current, key
        try:
            yield
        finally:
            self.current = saved

    def keep_mask(self, op: str, p: float, position: torch.Tensor, batch_dim: int) -> torch.Tensor:
        """True where an element is kept. ``position``: int64 global positions, with size 1 along ``batch_dim``."""
        if self.current is None:
            raise RuntimeError("dropout before set_micro_batch: the engine did not say which samples are in flight")
        shape = [1] * position.dim()
        shape[batch_dim] = -1
        bits = random_bits(position, self.current.keys.view(shape), key_of("dropout", op))
        return ((bits >> 32) & 0xFFFFFFFF) >= int(p * 2**32)

    def dropout(
        self, x: torch.Tensor, p: float, *, op: str, seq_offset: int = 0, width_offset: int = 0, width: int = 0
    ) -> torch.Tensor:
        """Drop elements of a slice ``x`` [seq, batch, width] of the residual stream.

        ``seq_offset``/``width_offset``: where the slice starts in the global tensor of row size ``width``.
        """
        if p == 0.0 or not self.enabled:
            return x
        seq, _, local = x.shape
        s = torch.arange(seq_offset, seq_offset + seq, dtype=torch.int64, device=x.device).view(-1, 1, 1)
        h = torch.arange(width_offset, width_offset + local, dtype=torch.int64, device=x.device).view(1, 1, -1)
        keep = self.keep_mask(op, p, s * (width or local) + h, batch_dim=1)
        return x * keep.to(x.dtype) / (1.0 - p)

    def dropout_probabilities(self, probs: torch.Tensor, p: float, *, op: str, head_offset: int) -> torch.Tensor:
        """Drop attention probabilities [batch, heads/tp, s, s]."""
        if p == 0.0 or not self.enabled:
            return probs
        _, heads, rows, cols = probs.shape
        dev = probs.device
        a = torch.arange(head_offset, head_offset + heads, dtype=torch.int64, device=dev).view(1, -1, 1, 1)
        i = torch.arange(rows, dtype=torch.int64, device=dev).view(1, 1, -1, 1)
        j = torch.arange(cols, dtype=torch.int64, device=dev).view(1, 1, 1, -1)
        keep = self.keep_mask(op, p, (a * rows + i) * cols + j, batch_dim=0)
        return probs * keep.to(probs.dtype) / (1.0 - p)
