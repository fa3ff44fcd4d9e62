"""Memory for gradients that live only until they are reduced (ZeRO stage 2)."""

from __future__ import annotations

from collections.abc import Callable

import torch

USUAL = 2
"""Buffers: in a backward pass one bucket fills up while the one before is being reduced."""


class GradBufferPool:
    """Flat buffers of ``size`` elements, lent to buckets while they fill up and are reduced."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.size, self.dtype, self.device = size, dtype, device
        self._free: list[torch.Tensor] = []
        self.made = 0
        """Buffers that exist."""

    def acquire(self, numel: int, free: Callable[[], bool]) -> torch.Tensor:
        """Return a buffer of ``numel`` elements, whatever they hold. With ``USUAL`` buffers lent out, ``free()`` is
        called until one has been released; if it returns false, one more is allocated."""
        while not self._free and self.made >= USUAL and free():
            pass
        if not self._free:
            self._free.append(torch.empty(self.size, dtype=self.dtype, device=self.device))
            self.made += 1
        return self._free.pop()[:numel]

    def release(self, buffer: torch.Tensor) -> None:
        """Return a buffer of :meth:`acquire` to the pool."""
        self._free.append(buffer.as_strided((self.size,), (1,), 0))

    def trim(self) -> None:
        """Free the buffers beyond ``USUAL`` that are not lent out."""
        while self._free and self.made > USUAL:
            self._free.pop()
            self.made -= 1
