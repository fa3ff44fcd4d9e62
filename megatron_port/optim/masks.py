"""Elements of weights that stay zero: their gradients are zero from the reduction on.

Which ones is in the masters themselves: what is exactly 0 when they are loaded stays 0. So a checkpoint holds the
masks, any layout reads them back, and an export has the zeros. An elementwise rule leaves an element alone
whose weight, gradient and moments are 0, and its gradient is no part of the norm.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron_port.config.sparsity import SparsityConfig
from megatron_port.optim.bucket_memory import StateShard


class GradientMasks:
    """Masks of the parts of sparse parameters that this rank updates: a byte per element."""

    def __init__(self, pieces: Iterable[StateShard], sparsity: SparsityConfig) -> None:
        self._masks = [
            (piece.gradient, (piece.master != 0).to(piece.gradient.device))
            for piece in pieces if sparsity.has(piece.record.name)
        ]

    @torch.no_grad()
    def apply(self) -> None:
        """Leave out the gradients of what stays zero, after their reduction and before their norm."""
        for gradient, mask in self._masks:
            gradient.mul_(mask)
