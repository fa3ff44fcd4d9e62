"""Intermediate tensors on disk: written in files of a bounded size, then seen through memory maps.

An import hands the checkpoint writer all its tensors at once. Mapped files cost
address space, not memory, so an import needs disk where it would need memory.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

FILE_BYTES = 1 << 28


class Stage:
    """Tensors put down in ``folder`` under numbers."""

    def __init__(self, folder: Path, *, file_bytes: int = FILE_BYTES) -> None:
        self._folder, self._limit = folder, file_bytes
        self._waiting: dict[str, torch.Tensor] = {}
        self._bytes = self._count = self._files = 0
        self._where: dict[int, int] = {}
        self._open: dict[int, object] = {}

    def put(self, tensor: torch.Tensor) -> int:
        """Keep a tensor; its number. At most ``file_bytes`` and one tensor wait in memory."""
        number = self._count
        self._count += 1
        self._waiting[str(number)] = tensor.contiguous()
        self._where[number] = self._files
        self._bytes += tensor.numel() * tensor.element_size()
        if self._bytes >= self._limit:
            self.flush()
        return number

    def flush(self) -> None:
        """Write what waits."""
        if self._waiting:
            save_file(self._waiting, self._folder / f"{self._files:06d}.safetensors")
            self._files += 1
            self._waiting, self._bytes = {}, 0

    def view(self, number: int) -> torch.Tensor:
        """The tensor, as a map of its file."""
        self.flush()
        file = self._where[number]
        if file not in self._open:
            path = self._folder / f"{file:06d}.safetensors"
            self._open[file] = safe_open(path, framework="pt", device="cpu")
        tensor: torch.Tensor = self._open[file].get_tensor(str(number))  # type: ignore[attr-defined]
        return tensor
