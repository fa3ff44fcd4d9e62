"""A store of objects behind a URL, through fsspec: sizes, ranges of bytes, lists, uploads, each with one clear error.

Credentials, region and endpoint come from where the store's own tools take them (for S3: ``AWS_ACCESS_KEY_ID``,
``AWS_SECRET_ACCESS_KEY``, ``AWS_ENDPOINT_URL``, ``~/.aws``); a run file never holds them.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from megatron_port.core.config.ranges import PACKAGES, url_fault
from megatron_port.core.errors import PortError
from megatron_port.core.io.files import write_bytes

T = TypeVar("T")

ATTEMPTS = 4
FIRST_PAUSE = 0.5
"""Seconds before the second attempt; twice as long before each further one."""
PART_BYTES = 64 << 20
"""Larger objects are uploaded in parts of this size."""
_OPTIONS: dict[str, dict[str, Any]] = {
    # Attempts are counted here; botocore's own would multiply them.
    "s3": {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 1}}},
}


@dataclass(frozen=True)
class ObjectInfo:
    """An object as its store describes it."""

    size: int
    """Bytes."""
    version: str
    """Changes with the content (ETag, or the time of the last change); empty if the store has none."""


class Store:
    """The objects below ``url``, named relative to it.

    Args:
        error: class of the errors that are raised: DataError for corpora, CheckpointError for checkpoints.

    Raises:
        error: here: the scheme is unknown or its package is not installed. In all methods: the store cannot be reached,
            refuses or answers with something else than it was asked for, after ``ATTEMPTS`` attempts.
    """

    def __init__(self, url: str, error: type[PortError]) -> None:
        self.url, self.error = url.rstrip("/"), error
        if fault := url_fault(url):
            raise error(fault)
        scheme = url.partition("://")[0]
        try:
            importlib.import_module(PACKAGES[scheme])
            import fsspec

            self._fs: Any = fsspec.filesystem(scheme, use_listings_cache=False, **_OPTIONS.get(scheme, {}))
        except ImportError as missing:
            package = PACKAGES[scheme]
            raise error(
                f"{url}: {package} is not installed; run: pip install {package} (or 'megatron_port[remote]')"
            ) from missing

    def place(self, name: str) -> str:
        """Return the URL of an object."""
        return f"{self.url}/{name}" if name else self.url

    def info(self, name: str = "") -> ObjectInfo:
        """Return size and version of an object. FileNotFoundError: there is none."""
        found = self._call("describe", name, lambda: self._fs.info(self.place(name)))
        if not isinstance(found.get("size"), int):
            raise self.error(f"{self.place(name)}: the server does not say how large it is; use one that does")
        version = found.get("ETag") or found.get("LastModified") or found.get("mtime") or ""
        return ObjectInfo(found["size"], str(version).strip('"'))

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop) of an object."""
        data: bytes = self._call(
            "read", name, lambda: self._fs.cat_file(self.place(name), start=start, end=stop) if stop > start else b""
        )
        if len(data) != stop - start:
            raise self.error(
                f"{self.place(name)}: asked for the bytes {start} to {stop}, got {len(data)} bytes; the server must "
                "serve ranges, and the object must not change while it is read"
            )
        return data

    def names(self) -> dict[str, int]:
        """Return the objects directly below the URL, and their bytes; empty where there are none."""
        try:
            found = self._call("list", "", lambda: self._fs.ls(self.url, detail=True))
        except FileNotFoundError:
            return {}
        return {str(f["name"]).rstrip("/").rpartition("/")[2]: int(f.get("size") or 0) for f in found}

    def pieces(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of an object, ``PART_BYTES`` at a time. FileNotFoundError: there is none."""
        size = self.info(name).size
        for start in range(0, size, PART_BYTES):
            yield self.read(name, start, min(start + PART_BYTES, size))

    def put(self, path: Path, name: str, part_bytes: int = PART_BYTES) -> None:
        """Copy a file to an object, in parts where it is larger than two of them; whole or not at all."""
        self._call("write", name, lambda: self._fs.put_file(str(path), self.place(name), chunksize=part_bytes))

    def write(self, name: str, data: bytes) -> None:
        """Replace a small object."""
        self._call("write", name, lambda: self._fs.pipe_file(self.place(name), data))

    def _call(self, what: str, name: str, action: Callable[[], T]) -> T:
        began = time.monotonic()
        for attempt in range(ATTEMPTS):
            try:
                return action()
            except FileNotFoundError:
                raise
            except Exception as fault:  # each library has its own; all mean that the store did not do it
                if isinstance(fault, PermissionError) or attempt + 1 == ATTEMPTS:
                    raise self._refusal(what, name, fault, attempt + 1, time.monotonic() - began) from fault
            time.sleep(FIRST_PAUSE * 2**attempt)
        raise AssertionError

    def _refusal(self, what: str, name: str, fault: Exception, attempts: int, seconds: float) -> PortError:
        reason = " ".join(f"{type(fault).__name__}: {fault}".split())[:300]
        if isinstance(fault, PermissionError) or type(fault).__name__ == "NoCredentialsError":
            return self.error(
                f"{self.place(name)}: no permission to {what} it ({reason}); check the credentials of this job "
                "(for s3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ~/.aws, and AWS_ENDPOINT_URL)"
            )
        return self.error(
            f"{self.place(name)}: could not {what} it in {attempts} attempts and {seconds:.0f} s ({reason}); check "
            "that the server runs and can be reached from this node (for s3: AWS_ENDPOINT_URL), then start again"
        )


# The bytes of one remote object by blocks, which are kept on disk.
#
# A block is in a file of its own, which appears by a rename and ends with the xxh3-128 of what it holds: processes of
# a node share the folder without locks (two that want the same block at once both fetch it), and a file that a full
# disk, a crash or a fault of the medium damaged is fetched again.

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
