"""xxh3-128 of a file, whole and by block, in one pass over its bytes."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from megatron_port.core.checkpoint.format import MAX_BLOCK, FileEntry

MIN_BLOCK, _BLOCKS = 1 << 20, 128
CHUNK = 1 << 20
"""Bytes read, written or hashed at a time: they are still in the core's cache when the next hand touches them."""
GRAIN = 1 << 16
"""Bytes of a verified block that have a hash of their own in memory: the least that can be read again and trusted."""


def block_bytes(size: int) -> int:
    """Return the block size for a file of ``size`` bytes: at most 128 of 1 to 64 MiB, so manifests stay small."""
    width = MIN_BLOCK
    while width < MAX_BLOCK and size > _BLOCKS * width:
        width *= 2
    return width


class SpanHashes:
    """Hashes of consecutive ranges of a stream. ``spans``: their ends, rising.

    Ranges of ``limit`` bytes or more get no hash (an empty text): blocks tell those apart.
    """

    def __init__(self, spans: Sequence[tuple[int, int]], limit: int) -> None:
        self._spans, self._limit = spans, limit
        self._digest = xxhash.xxh3_128()
        self._at = 0
        self.hashes: list[str] = []

    def update(self, data: memoryview) -> None:
        """Hash the next bytes of the stream."""
        while len(data) and len(self.hashes) < len(self._spans):
            start, stop = self._spans[len(self.hashes)]
            part, data = data[: stop - self._at], data[stop - self._at :]
            if stop - start < self._limit:
                self._digest.update(part)
            self._at += len(part)
            if self._at == stop:
                self.hashes.append(self._digest.hexdigest() if stop - start < self._limit else "")
                self._digest.reset()


class GrainHashes:
    """Hashes (xxh3-128) of each ``grain`` bytes of a stream, one after the other; the last may be shorter."""

    WIDTH = 16
    """Bytes of a hash."""
    UNKNOWN = bytes(WIDTH)

    def __init__(self, grain: int) -> None:
        self._grain, self._room = grain, grain
        self._digest = xxhash.xxh3_128()
        self._done = bytearray()

    def update(self, data: memoryview, *, skip: bool = False) -> None:
        """Hash the next bytes of the stream. ``skip``: enter whole grains in them as ``UNKNOWN`` instead."""
        at, size, grain = 0, len(data), self._grain
        while at < size:
            if self._room == grain and size - at >= grain:  # a whole one at once
                self._done += self.UNKNOWN if skip else xxhash.xxh3_128_digest(data[at : at + grain])
                at += grain
                continue
            part = data[at : at + self._room]
            self._digest.update(part)
            at += len(part)
            self._room -= len(part)
            if not self._room:
                self._close()

    def digests(self) -> bytes:
        """Return the hashes of all that has passed, ``WIDTH`` bytes each."""
        if self._room != self._grain:
            self._close()
        return bytes(self._done)

    def _close(self) -> None:
        self._done += self._digest.digest()
        self._digest.reset()
        self._room = self._grain


class Digest:
    """Hashes of a stream. ``block_bytes``: size of a block."""

    def __init__(self, block_bytes: int) -> None:
        self._width = block_bytes
        self._whole = xxhash.xxh3_128()
        self._block = xxhash.xxh3_128()
        self._blocks: list[str] = []
        self._size = 0

    def update(self, data: memoryview | bytes) -> None:
        """Hash the next bytes."""
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
        """Return size and hashes of what has passed."""
        last = [self._block.hexdigest()] if self._size % self._width else []
        return FileEntry(self._size, self._whole.hexdigest(), self._width, (*self._blocks, *last))
