"""Dropout whose mask is a function of (seed, step, global sample, op, global element).

The mask of a sample is the same whichever rank computes it, however the
sequence, the heads or the batch are split, and when a layer is recomputed. The
key of a micro-batch (its step and sample ids) is set by the engine before each
forward pass; recompute restores the key that the forward pass saw, because by
then the engine has moved on.

An element has a position in the logical tensor of its sample. One 64-bit hash,
``random_bits(position >> 2, key of the sample, op_key(op))``, serves four
neighbours: position & 3 says which 16 bits of it, from the low end. An element
is dropped where those are below ``drop_threshold(p)``; so p is rounded to
1/65536, and the scale of what is kept fits the rounded p exactly. The own
kernels (``kernels.ops``: dropout, softmax, attention) compute the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial

import torch

from megatron_port.core.dist.collectives import to_device_async
from megatron_port.core.dist.counter import key_of, random_bits
from megatron_port.core.dist.positions import Positions, Run
from megatron_port.core.layers.fused import ProbabilityDropout

FIELD = 1 << 16
"""Values of an element's random field of 16 bits."""


def drop_threshold(p: float) -> int:
    """Return how many of the 65536 values of a field drop an element, for p in [0, 1): at most 65535."""
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout probability {p} is not in [0, 1)")
    return min(round(p * FIELD), FIELD - 1)


@cache
def op_key(op: str) -> int:
    """The second key of an op's masks."""
    return key_of("dropout", op)


def keep_scale(p: float) -> float:
    """Return the factor of kept elements that preserves the expectation."""
    return FIELD / (FIELD - drop_threshold(p))


def keep_mask(
    keys: torch.Tensor, key2: int, threshold: int, row: torch.Tensor, *, width: int, offset: int, count: int
) -> torch.Tensor:
    """True where an element is kept: ``count`` columns from ``offset`` on of the rows ``row`` of length ``width``.

    ``keys``, ``row``: int64, broadcast against one another, the last dimension 1; ``key2``: ``op_key`` of the op.
    """
    device = row.device
    if width % 4 == 0:  # every row starts a group of four: one hash per group, whose fields lie in memory in order
        first, before = offset >> 2, offset & 3
        group = torch.arange(first, (offset + count + 3) >> 2, dtype=torch.int64, device=device)
        bits = random_bits(row * (width >> 2) + group, keys, key2)
        field = bits.contiguous().view(torch.int16)[..., before : before + count]
        # Unsigned 16-bit numbers compare like signed ones with the upper bit turned over.
        return (field ^ -0x8000) >= threshold - 0x8000
    position = row * width + torch.arange(offset, offset + count, dtype=torch.int64, device=device)
    bits = random_bits(position >> 2, keys, key2)
    return ((bits >> ((position & 3) << 4)) & 0xFFFF) >= threshold


def sample_keys(seed: int, step: int, sample_ids: Sequence[int]) -> list[int]:
    """Return the dropout key of each sample of a step, as int64."""
    return [key_of("sample", seed, step, i) for i in sample_ids]


@dataclass(frozen=True)
class SampleKey:
    """Identity of the samples of a micro-batch."""

    seed: int
    step: int
    sample_ids: tuple[int, ...]
    device: torch.device
    filled: torch.Tensor | None = field(default=None, compare=False)
    """The keys, where the engine fills them in for each replay of a captured step; there are no sample_ids then."""

    @cached_property
    def keys(self) -> torch.Tensor:
        """int64 [batch]: one key per sample, on the device. Made at the first dropout, so that a model without dropout
        pays nothing."""
        if self.filled is not None:
            return self.filled
        keys = torch.tensor(sample_keys(self.seed, self.step, self.sample_ids), dtype=torch.int64)
        return to_device_async(keys, self.device)


class DropoutStream:
    """Dropout masks of a model on one rank, for the samples in flight.

    ``enabled`` is False during evaluation.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        self.device = device
        self.enabled = True
        self._no_keys = torch.empty(0, dtype=torch.int64, device=device)
        self.samples: SampleKey | None = None
        """Samples in flight; None before the first micro-batch."""

    def set_micro_batch(self, step: int, sample_ids: Sequence[int], keys: torch.Tensor | None = None) -> SampleKey:
        """Set the samples of the next forward pass. ``keys``: memory with their keys, of a captured step."""
        self.samples = SampleKey(self.seed, step, tuple(int(i) for i in sample_ids), self.device, keys)
        return self.samples

    def op_key(self, op: str) -> int:
        """Return the second key of an op's masks, as the own kernel takes it."""
        return op_key(op)

    def sample_keys(self, p: float) -> torch.Tensor:
        """Return the keys of the samples in flight, int64 [batch]; empty where p is 0, which needs none."""
        if p == 0.0:
            return self._no_keys
        if self.samples is None:
            raise RuntimeError("dropout before set_micro_batch: the engine did not say which samples are in flight")
        return self.samples.keys

    def keep_mask(
        self, op: str, p: float, row: torch.Tensor, *, width: int, offset: int = 0, count: int, batch_dim: int
    ) -> torch.Tensor:
        """True where an element is kept, for ``count`` elements from ``offset`` on of these rows.

        ``row``: int64 global row numbers, rows being ``width`` long, with size 1 along ``batch_dim`` and last.
        """
        shape = [1] * row.dim()
        shape[batch_dim] = -1
        keys = self.sample_keys(p).view(shape)
        return keep_mask(keys, self.op_key(op), drop_threshold(p), row, width=width, offset=offset, count=count)

    def dropout(
        self, x: torch.Tensor, p: float, *, op: str, positions: Positions | None = None, width_offset: int = 0,
        width: int = 0,
    ) -> torch.Tensor:
        """Drop elements of a slice ``x`` [rows, batch, width] of the residual stream.

        ``positions``: of the rows (None: from 0 on); ``width_offset``: where the slice starts in a row of ``width``.
        """
        if p == 0.0 or not self.enabled:
            return x
        rows, _, local = x.shape
        row = (positions or Positions.contiguous(rows)).index(x.device).view(-1, 1, 1)
        keep = self.keep_mask(op, p, row, width=width or local, offset=width_offset, count=local, batch_dim=1)
        return x * keep.to(x.dtype) * keep_scale(p)

    def probability_dropout(
        self, p: float, *, op: str, head_offset: int, positions: Positions, keys: Positions | None = None,
        seq_length: int = 0,
    ) -> ProbabilityDropout:
        """Return the dropout of the probabilities of queries at these positions, for the samples in flight.

        ``keys``: those of the columns, of a sequence of ``seq_length``; None: the columns are all its positions.
        """
        sample_keys, key2 = self.sample_keys(p), self.op_key(op)
        drop = partial(
            _drop_probabilities, sample_keys=sample_keys, key2=key2, p=p, head_offset=head_offset, positions=positions,
            keys=keys, seq_length=seq_length,
        )
        return ProbabilityDropout(
            drop=drop, keys=sample_keys, op_key=key2, p=p, head_offset=head_offset,
            first_query=positions.runs[0].start if len(positions.runs) == 1 and keys is None else None,
        )


def _drop_probabilities(
    probs: torch.Tensor, *, sample_keys: torch.Tensor, key2: int, p: float, head_offset: int, positions: Positions,
    keys: Positions | None, seq_length: int,
) -> torch.Tensor:
    _, heads, _, cols = probs.shape
    dev, width = probs.device, seq_length or cols
    a = torch.arange(head_offset, head_offset + heads, dtype=torch.int64, device=dev).view(1, -1, 1, 1)
    row = a * width + positions.index(dev).view(1, 1, -1, 1)
    runs = (Run(0, cols),) if keys is None else keys.runs
    parts = [
        keep_mask(sample_keys.view(-1, 1, 1, 1), key2, drop_threshold(p), row, width=width, offset=start, count=count)
        for start, count in runs
    ]
    keep = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    return probs * keep.to(probs.dtype) * keep_scale(p)
