"""The bytes of one remote object by blocks, which are kept on disk.

A block is in a file of its own, which appears by a rename and ends with the xxh3-128 of what it holds: processes of a
node share the folder without locks (two that want the same block at once both fetch it), and a file that a full disk, a
crash or a fault of the medium damaged is fetched again.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import xxhash

from megatron_port.core.io.atomic import write_bytes
from megatron_port.ext.storage.store import Store

DIGEST = 16
IN_MEMORY = 16 << 20
"""Bytes of the blocks that a process keeps in memory besides."""
LOOK_EVERY = 64
"""Blocks that a process writes between looks at how full the folder is."""


class Blocks:
    """Read access to the object ``name`` of ``size`` bytes.

    Args:
        folder: on disk; of this object and this version of it alone.
        block_bytes: of each block but the last.
        hashes: of each block, as the object's owner recorded them; empty: none. ``hash_of``: makes one.
        limit: bytes of blocks on disk; the least recently used go first. 0: no limit.
    """

    def __init__(
        self, store: Store, name: str, size: int, folder: Path, *, block_bytes: int, hashes: Sequence[str] = (),
        hash_of: Callable[[bytes], str] = xxhash.xxh3_64_hexdigest, limit: int = 0,
    ) -> None:
        self.store, self.name, self.size, self.folder = store, name, size, folder
        self.block_bytes, self.hashes, self.hash_of, self.limit = block_bytes, hashes, hash_of, limit
        self._held: OrderedDict[int, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self._written = 0

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop).

        Raises:
            PortError: of the store's class: it could not be read, or what it gave is not what its owner recorded.
        """
        size = self.block_bytes
        parts = []
        for block in range(start // size, -(-stop // size)):
            data, first = self._block(block), block * size
            parts.append(data[max(start - first, 0):stop - first])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _block(self, block: int) -> bytes:
        with self._lock:
            if block in self._held:
                self._held.move_to_end(block)
                return self._held[block]
        data = self._from_disk(block)
        if data is None:
            data = self._fetch(block)
            self._keep(block, data)
        with self._lock:
            self._held[block] = data
            while len(self._held) > max(IN_MEMORY // self.block_bytes, 1):
                self._held.popitem(last=False)
        return data

    def _span(self, block: int) -> tuple[int, int]:
        return block * self.block_bytes, min((block + 1) * self.block_bytes, self.size)

    def _path(self, block: int) -> Path:
        return self.folder / f"{block:08d}"

    def _from_disk(self, block: int) -> bytes | None:
        try:
            data = self._path(block).read_bytes()
        except OSError:
            return None
        start, stop = self._span(block)
        content = data[:-DIGEST]
        if len(content) != stop - start or xxhash.xxh3_128_digest(content) != data[-DIGEST:]:
            return None
        if self.limit:
            with suppress(OSError):
                os.utime(self._path(block))
        return content

    def _fetch(self, block: int) -> bytes:
        data = self.store.read(self.name, *self._span(block))
        if self.hashes and (found := self.hash_of(data)) != self.hashes[block]:
            start, stop = self._span(block)
            raise self.store.error(
                f"{self.store.place(self.name)}: the bytes {start} to {stop} are not those that were recorded when it "
                f"was made (hash {found}, recorded {self.hashes[block]}); upload it again"
            )
        return data

    def _keep(self, block: int, data: bytes) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Not synced: a file that a crash emptied is told by its hash, and fetched again.
            write_bytes(self._path(block), data + xxhash.xxh3_128_digest(data), durable=False)
        except OSError as error:
            raise self.store.error(
                f"{self.folder}: a block of {self.store.place(self.name)} cannot be kept ({error.strerror or error}); "
                "make room, name another folder with data.remote_cache, or limit it with data.remote_cache_gb"
            ) from error
        with self._lock:
            self._written += 1
            look = self.limit and self._written % LOOK_EVERY == 1
        if look:
            self._shrink()

    def _shrink(self) -> None:
        """Remove the blocks that were used least recently, until nine tenths of the limit are left."""
        found = []
        for entry in os.scandir(self.folder):
            with suppress(OSError):
                if not entry.name.startswith("."):
                    status = entry.stat()
                    found.append((status.st_mtime_ns, status.st_size, entry.path))
        used = sum(size for _, size, _ in found)
        if used <= self.limit:
            return
        for _, size, path in sorted(found):
            with suppress(OSError):
                os.unlink(path)
            used -= size
            if used <= self.limit * 0.9:
                return
