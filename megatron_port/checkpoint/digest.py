"""xxh3-128 of a file, whole and by block, in one pass over its bytes."""

from __future__ import annotations

import xxhash

from megatron_port.checkpoint.format import BLOCK, FileEntry

CHUNK = 1 << 20
"""Bytes read, written or hashed at a time: they are still in the core's cache when the next hand touches them."""


class Digest:
    """Hashes a stream. ``block_bytes``: size of a block."""

    def __init__(self, block_bytes: int = BLOCK) -> None:
        self._width = block_bytes
        self._whole = xxhash.xxh3_128()
        self._block = xxhash.xxh3_128()
        self._blocks: list[str] = []
        self._size = 0

    def update(self, data: memoryview | bytes) -> None:
        """The next bytes."""
        view = memoryview(data).cast("B")
        at = 0
        while at < len(view):
            room = self._width - self._size % self._width
            part = view[at : at + min(CHUNK, room)]
            self._whole.update(part)
            self._block.update(part)
            at += len(part)
            self._size += len(part)
            if self._size % self._width == 0:
                self._blocks.append(self._block.hexdigest())
                self._block.reset()

    def entry(self) -> FileEntry:
        """Size and hashes of what has passed."""
        last = [self._block.hexdigest()] if self._size % self._width else []
        return FileEntry(self._size, self._whole.hexdigest(), self._width, (*self._blocks, *last))
