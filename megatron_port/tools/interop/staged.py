"""Intermediate tensors on disk: written in files of a bounded size, then seen through memory maps.

An import hands the checkpoint writer all its tensors at once. Mapped files cost
address space, not memory, so an import needs disk where it would need memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megatron_port.core.dist.record import StatePiece

Shape = tuple[int, ...]
FILE_BYTES = 1 << 28


class Stage:
    """Slices of parameters put down in ``folder``, in files of about ``file_bytes``.

    ``put_down``: called with the bytes of each slice.
    """

    def __init__(
        self, folder: Path, *, file_bytes: int = FILE_BYTES, put_down: Callable[[int], None] = lambda amount: None
    ) -> None:
        self._folder, self._limit, self._put_down = folder, file_bytes, put_down
        self._waiting: dict[str, torch.Tensor] = {}
        self._bytes = 0
        self._files: list[Path] = []
        self._slices: list[tuple[str, str, Shape, Shape, Shape]] = []
        """(name, kind, global shape, offset, shape) of each tensor, whose place in the list is its key."""

    def put(self, name: str, kind: str, global_shape: Shape, offset: Shape, tensor: torch.Tensor) -> None:
        """Keep the slice of a parameter at ``offset``. At most ``file_bytes`` and one tensor wait in memory."""
        self._waiting[str(len(self._slices))] = tensor.contiguous()
        self._slices.append((name, kind, global_shape, offset, tuple(tensor.shape)))
        self._bytes += tensor.nbytes
        self._put_down(tensor.nbytes)
        if self._bytes >= self._limit:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            self._files.append(self._folder / f"{len(self._files):06d}.safetensors")
            save_file(self._waiting, self._files[-1])
            self._waiting, self._bytes = {}, 0

    def pieces(self) -> list[StatePiece]:
        """Return all slices, each as a map of its file."""
        self._flush()
        out = []
        for path in self._files:
            with safe_open(path, framework="pt", device="cpu") as file:
                for key in sorted(file.keys(), key=int):
                    name, kind, global_shape, offset, shape = self._slices[int(key)]
                    out.append(StatePiece(name=name, kind=kind, global_shape=global_shape, offset=offset, shape=shape,
                                          flat_start=0, tensor=file.get_tensor(key).reshape(-1)))
        return out
