"""Hashes of a corpus' files: of a whole file, and of the blocks of one while it is written or read."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import xxhash

from megatron_port.core.data.format import CHUNK

LEAF_BYTES = 1 << 20
"""The smallest block of a .bin file that has a hash of its own."""
MOST_BLOCKS = 1024
"""Hashes that a sidecar holds; blocks double when there would be more."""


def file_blocks(path: Path, size: int = 8 * CHUNK) -> Iterator[bytes]:
    """Yield a file's bytes, ``size`` at a time."""
    with open(path, "rb") as stream:
        while block := stream.read(size):
            yield block


def file_xxh3(path: Path) -> str:
    """Return the xxh3-128 of a file's bytes, 32 hexadecimal digits."""
    digest = xxhash.xxh3_128()
    for block in file_blocks(path):
        digest.update(block)
    return digest.hexdigest()


class BlockHashes:
    """xxh3-64 of each block of a stream of unknown length, in at most ``MOST_BLOCKS`` values.

    Blocks begin as ``LEAF_BYTES``; whenever there would be too many, neighbours are joined (the hash of
    their two hashes) and the block doubles. So a damaged file of 10 GB is narrowed down to 16 MiB.
    """

    def __init__(self) -> None:
        self.leaves = 1
        """Leaves a block."""
        self.total = xxhash.xxh3_128()
        self._done: list[int] = []
        self._open: list[int] = []
        self._leaf = xxhash.xxh3_64()
        self._filled = 0

    @property
    def block_bytes(self) -> int:
        """Size in bytes of each block except the last."""
        return self.leaves * LEAF_BYTES

    def update(self, data: bytes | memoryview) -> None:
        """Hash the next bytes of the stream."""
        self.total.update(data)
        view = memoryview(data).cast("B")
        while len(view):
            take = min(len(view), LEAF_BYTES - self._filled)
            self._leaf.update(view[:take])
            self._filled += take
            view = view[take:]
            if self._filled == LEAF_BYTES:
                self._close_leaf()

    def hexdigest(self) -> str:
        """Return the blocks' hashes in order, 16 digits each; :meth:`update` may still be called."""
        # What has not filled a block counts as one: the open leaf, too.
        rest = [*self._open, *([self._leaf.intdigest()] if self._filled else [])]
        return "".join(f"{h:016x}" for h in [*self._done, *([_joined(rest)] if rest else [])])

    def _close_leaf(self) -> None:
        self._open.append(self._leaf.intdigest())
        self._leaf, self._filled = xxhash.xxh3_64(), 0
        if len(self._open) == self.leaves:
            self._done.append(_joined(self._open))
            self._open = []
            if len(self._done) == MOST_BLOCKS:
                self._done = [_pair(a, b) for a, b in zip(self._done[::2], self._done[1::2])]
                self.leaves *= 2


def block_hash(data: bytes | memoryview) -> str:
    """Return the hash that :class:`BlockHashes` has of a whole block, or of the last one; 16 hexadecimal digits."""
    leaves = (memoryview(data)[i:i + LEAF_BYTES] for i in range(0, len(data), LEAF_BYTES))
    return f"{_joined([xxhash.xxh3_64_intdigest(leaf) for leaf in leaves]):016x}"


def _pair(a: int, b: int) -> int:
    return int(xxhash.xxh3_64_intdigest(struct.pack("<QQ", a, b)))


def _joined(hashes: list[int]) -> int:
    """Neighbours joined until one is left; an odd one out passes on as it is."""
    while len(hashes) > 1:
        odd = hashes[-1:] if len(hashes) % 2 else []
        hashes = [_pair(a, b) for a, b in zip(hashes[::2], hashes[1::2])] + odd
    return hashes[0]
