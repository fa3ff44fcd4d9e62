"""Elements of weights that stay zero: their gradients are zero from the reduction on.

Which ones is in the masters themselves: what is exactly 0 when they are loaded stays 0. So a checkpoint holds the
masks, any layout reads them back, and an export has the zeros. An elementwise rule leaves an element alone
whose weight, gradient and moments are 0, and its gradient is no part of the norm.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron_port.core.config.sparsity import SparsityConfig
from megatron_port.core.optim.bucket_memory import Bucket, StateShard


class GradientMasks:
    """Masks of the parts of sparse parameters that this rank updates: a byte per element.

    ``pieces``: what this rank updates, each with its bucket.
    """

    def __init__(self, pieces: Iterable[tuple[Bucket, StateShard]], sparsity: SparsityConfig) -> None:
        self._masks: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._done: set[int] = set()
        for bucket, piece in pieces:
            if sparsity.has(piece.record.name):
                mask = (piece.master != 0).to(piece.gradient.device)
                self._masks.setdefault(id(bucket), []).append((piece.gradient, mask))
        self.some = bool(self._masks)
        """Whether any are kept."""

    def apply_to(self, bucket: Bucket) -> None:
        """Leave out the gradients of what stays zero in a bucket whose sums are final, before they go to the host."""
        self._apply(id(bucket))

    def apply(self) -> None:
        """Leave out those of all other buckets, after their reduction and before the norm."""
        for number in self._masks:
            self._apply(number)
        self._done.clear()

    @torch.no_grad()
    def _apply(self, number: int) -> None:
        if number in self._done:  # its way to the host may not have ended
            return
        self._done.add(number)
        for gradient, mask in self._masks.get(number, ()):
            gradient.mul_(mask)
