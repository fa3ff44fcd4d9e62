"""Ranged reads of one file in which every byte that is used was hashed where it is.

What is wanted of a block is read straight into its destination and hashed there, a mebibyte at a time while it is in
the core's cache. What else is in it goes to a scratch buffer, where the next read may find it; several files share it,
so the memory is one block whatever is read.

A file may return other bytes when it is read again (a flipped bit on the way, a writer, another server's copy), so a
block's hash proves nothing about a later read. Each ``GRAIN`` of what was not wanted is therefore hashed while its
block is verified, and a later read fetches whole grains and compares them: 16 bytes of memory per 64 KiB, and less
than two grains read beyond what is wanted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import xxhash

from megatron_port.core.checkpoint.format import DTYPES, MAX_HEADER, FileEntry
from megatron_port.core.checkpoint.shard import CHUNK
from megatron_port.core.errors import DamagedCheckpoint
from megatron_port.core.io.files import open_regular
from megatron_port.core.io.logging import Advance, silent

GRAIN = 1 << 16
"""Bytes of a verified block that have a hash of their own in memory: the least that can be read again and trusted."""
_WIDTHS = dict(DTYPES.values())


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


class Scratch:
    """Memory of one block, and whose bytes are in it."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._holds: tuple[Path, int] | None = None
        self._hole = (0, 0)
        self.edges = memoryview(bytearray(2 * GRAIN))
        """Bytes that a second read fetches before and after those that are wanted."""

    def space(self, size: int) -> memoryview:
        """Return ``size`` bytes to fill; what was there is gone."""
        self._holds = None
        if len(self._buffer) < size:
            self._buffer = bytearray(size)
        return memoryview(self._buffer)[:size]

    def keep(self, path: Path, index: int, hole: tuple[int, int]) -> None:
        """Note verified bytes of that block, all but those from ``hole[0]`` up to ``hole[1]``."""
        self._holds, self._hole = (path, index), hole

    def part(self, path: Path, index: int, start: int, stop: int) -> memoryview | None:
        """Return bytes of a block, if they are all here."""
        if self._holds != (path, index) or (start < self._hole[1] and self._hole[0] < stop):
            return None
        return memoryview(self._buffer)[start:stop]

    def forget(self) -> None:
        """Hold nothing."""
        self._holds = None


class RangedFile:
    """Reader of a data file of a checkpoint.

    Args:
        path: the file.
        entry: its size and hashes, from a manifest that was checked.
        contents: says which tensors are damaged in a damaged byte range (for messages).
        scratch: shared by the files of a checkpoint.
    """

    def __init__(
        self, path: Path, entry: FileEntry, contents: Callable[[int, int], str], scratch: Scratch
    ) -> None:
        self.path, self._entry, self._scratch, self._contents = path, entry, scratch, contents
        self._width = entry.block_bytes or max(entry.size, 1)
        """Version 1 has no blocks: its one hash is that of a block as long as the file."""
        self._hashes = entry.blocks or (entry.hash,)
        self._known: dict[int, bytes] = {}
        """Block → the hashes of its grains, taken while the block was verified."""
        self._handle: int | None = None
        self._header: dict[str, tuple[str, int, int]] | None = None

    def close(self) -> None:
        """Close the file descriptor; the hashes of what was verified stay known."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def place(self, key: str) -> tuple[str, int, int] | None:
        """Return (dtype code, first byte, last byte + 1) of a stored tensor, from the file's header; None: absent."""
        if self._header is None:
            size = self._entry.size
            prefix = bytearray(8)
            if size < 8:
                raise DamagedCheckpoint(f"{self.path}: {size} bytes are no safetensors file")
            self.read_into(0, memoryview(prefix))
            length = int.from_bytes(prefix, "little")
            if length > min(size - 8, MAX_HEADER):
                raise DamagedCheckpoint(f"{self.path}: its header claims {length} bytes of a file of {size}")
            text = bytearray(length)
            self.read_into(8, memoryview(text))
            base = 8 + length
            found = parse_header(bytes(text), size - base, str(self.path))
            self._header = {k: (code, base + a, base + z) for k, (code, a, z) in found.items()}
        return self._header.get(key)

    def read_into(self, start: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes from ``start``.

        Raises:
            DamagedCheckpoint: a block that they are in is not what was saved, or cannot be read.
        """
        stop, width = start + len(out), self._width
        if not 0 <= start <= stop <= self._entry.size:
            raise ValueError(f"bytes {start} to {stop} of a file of {self._entry.size}")
        for index in range(start // width, -(-stop // width)):
            low, high = index * width, min((index + 1) * width, self._entry.size)
            a, z = max(low, start), min(high, stop)
            part = out[a - start : z - start]
            held = self._scratch.part(self.path, index, a - low, z - low)
            if held is not None:
                part[:] = held
            elif self._read_again(index, a, part):
                pass
            elif (a, z) == (low, high):
                self._read_block(index, part)
            elif not self._entry.block_bytes:
                self._read_whole()
                self._read_again(index, a, part)
            else:
                around = self._scratch.space(high - low)
                self._read_block(index, part, around[: a - low], around[z - low :])
                self._scratch.keep(self.path, index, (a - low, z - low))

    def faults(self, advance: Advance = silent) -> Iterator[str]:
        """Read and hash everything anew; yield what is wrong, one text per block. ``advance``: bytes read, all."""
        entry = self._entry
        self._known.clear()
        self._header = None
        self._scratch.forget()
        clean = True
        whole = xxhash.xxh3_128()
        for index in range(len(entry.blocks)):
            low = index * entry.block_bytes
            block = self._scratch.space(min(entry.block_bytes, entry.size - low))
            try:
                self._read_block(index, block)
            except DamagedCheckpoint as error:
                clean = False
                yield str(error)
            if clean:
                whole.update(block)
            advance(min(low + entry.block_bytes, entry.size), entry.size)
        if not entry.block_bytes:
            try:
                self._read_whole()
            except DamagedCheckpoint as error:
                yield str(error)
        elif clean and whole.hexdigest() != entry.hash:
            yield f"{self.path}: every block matches its hash, the whole file does not: the manifest contradicts itself"

    def _read_whole(self) -> None:
        """Verify a file of version 1 as one block, in constant memory."""
        size = self._entry.size
        buffer = memoryview(bytearray(min(size, CHUNK)))
        digest, grains = xxhash.xxh3_128(), GrainHashes(GRAIN)
        for at in range(0, size, CHUNK):
            part = buffer[: min(CHUNK, size - at)]
            self._pread(at, part)
            digest.update(part)
            grains.update(part)
        self._compare(0, digest.hexdigest())
        self._known[0] = grains.digests()

    def _read_block(self, index: int, wanted: memoryview, *around: memoryview) -> None:
        """Read a block into ``around[0]``, ``wanted`` and ``around[1]``, and verify it.

        Grains within ``wanted`` get no hash: they are rarely read again, and hashing all twice costs a sixth of the
        speed of a load. A block of which they are wanted again is verified anew.
        """
        at = index * self._width
        digest, grains = xxhash.xxh3_128(), GrainHashes(GRAIN)
        for out in (around[0], wanted, around[1]) if around else (wanted,):
            for start in range(0, len(out), CHUNK):
                part = out[start : start + CHUNK]
                self._pread(at, part)
                digest.update(part)
                if around:
                    grains.update(part, skip=out is wanted)
                at += len(part)
        self._compare(index, digest.hexdigest())
        if around:
            self._known[index] = grains.digests()

    def _compare(self, index: int, found: str) -> None:
        if found != self._hashes[index]:
            low = index * self._width
            high = min(low + self._width, self._entry.size)
            what = f"block {index} (bytes {low} to {high - 1})" if self._entry.block_bytes else "its content"
            raise DamagedCheckpoint(
                f"{self.path}: {what} does not match its hash ({found}, expected {self._hashes[index]}): damaged is "
                f"{self._contents(low, high)}"
            )

    def _read_again(self, index: int, start: int, out: memoryview) -> bool:
        """Fill ``out`` from byte ``start`` of a block, comparing whole grains; return whether every hash was known."""
        low = index * self._width
        high = min(low + self._width, self._entry.size)
        stop = start + len(out)
        first, last = (start - low) // GRAIN, -(-(stop - low) // GRAIN)
        head = start - (low + first * GRAIN)
        tail = min(low + last * GRAIN, high) - stop
        width = GrainHashes.WIDTH
        known = self._known.get(index, b"")[first * width : last * width]
        if not known or any(known[i : i + width] == GrainHashes.UNKNOWN for i in range(0, len(known), width)):
            return False
        at, grains = start - head, GrainHashes(GRAIN)
        for part in (self._scratch.edges[:head], out, self._scratch.edges[head : head + tail]):
            for begin in range(0, len(part), CHUNK):
                chunk = part[begin : begin + CHUNK]
                self._pread(at, chunk)
                grains.update(chunk)
                at += len(chunk)
        found = grains.digests()
        if found != known:
            wrong = next(i for i in range(0, len(known), width) if found[i : i + width] != known[i : i + width])
            a = low + (first + wrong // width) * GRAIN
            z = min(a + GRAIN, high)
            raise DamagedCheckpoint(
                f"{self.path}: bytes {a} to {z - 1} were right when block {index} was verified and are not now: the "
                f"file changed, or was read wrongly; in them: {self._contents(a, z)}"
            )
        return True

    def _pread(self, start: int, out: memoryview) -> None:
        try:
            if self._handle is None:
                self._handle = open_regular(self.path)
            at = 0
            while at < len(out):
                count = os.preadv(self._handle, [out[at:]], start + at)
                if not count:
                    raise DamagedCheckpoint(
                        f"{self.path}: it ends at byte {start + at}, the manifest says {self._entry.size}; in what is "
                        f"missing: {self._contents(start + at, self._entry.size)}"
                    )
                at += count
        except OSError as error:
            raise self._unreadable(error, start, start + len(out)) from error

    def _unreadable(self, error: OSError, start: int, stop: int) -> DamagedCheckpoint:
        return DamagedCheckpoint(
            f"{self.path}: bytes {start} to {stop - 1} cannot be read: {error.strerror or error}; in them: "
            f"{self._contents(start, stop)}"
        )


def verified_files() -> Callable[[Path, FileEntry, Callable[[int, int], str]], RangedFile]:
    """Return what opens the files of one checkpoint: :class:`RangedFile` with a scratch buffer that they share."""
    return partial(RangedFile, scratch=Scratch())


def parse_header(text: bytes, data_bytes: int, where: str) -> dict[str, tuple[str, int, int]]:
    """Key → (dtype code, first byte, last byte + 1) of a safetensors header, offsets counted from its end.

    Nothing is allocated from a number in the text. Only this package's files are expected: 1-D tensors.

    Raises:
        DamagedCheckpoint: it is not a header, or an entry leaves the file's ``data_bytes``.
    """
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{where}: its header is damaged: {error}") from None
    if not isinstance(header, dict):
        raise DamagedCheckpoint(f"{where}: its header is damaged: not an object")
    out = {}
    for key, value in header.items():
        if key == "__metadata__":
            continue
        place = _place(value, data_bytes)
        if place is None:
            raise DamagedCheckpoint(f"{where}: its header is damaged at {key!r:.200}")
        out[key] = place
    return out


def _place(value: Any, data_bytes: int) -> tuple[str, int, int] | None:
    if not isinstance(value, dict):
        return None
    code, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(code, str) or code not in _WIDTHS:
        return None
    if not isinstance(shape, list) or len(shape) > 1 or not isinstance(offsets, list) or len(offsets) != 2:
        return None
    if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 63 for n in (*shape, *offsets)):
        return None
    start, stop = offsets
    if not start <= stop <= data_bytes or stop - start != prod(shape) * _WIDTHS[code]:
        return None
    return code, start, stop
