"""Ranged reads of one file in which every block is verified before its first byte is used.

What is wanted of a block is read straight into its destination and hashed there, a mebibyte at a time while it is in
the core's cache. What else is in it goes to a scratch buffer, where the next read may find it; several files share it,
so the memory is one block whatever is read. A block is hashed once: later reads of it fetch only the bytes they want.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

from megatron_port.checkpoint.digest import CHUNK
from megatron_port.checkpoint.format import FileEntry, hash_file
from megatron_port.checkpoint.shard import MAX_HEADER, parse_header
from megatron_port.errors import DamagedCheckpoint


class Scratch:
    """A block's worth of memory, and whose bytes are in it."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._holds: tuple[Path, int] | None = None
        self._hole = (0, 0)

    def space(self, size: int) -> memoryview:
        """``size`` bytes to fill; what was there is gone."""
        self._holds = None
        if len(self._buffer) < size:
            self._buffer = bytearray(size)
        return memoryview(self._buffer)[:size]

    def keep(self, path: Path, index: int, hole: tuple[int, int]) -> None:
        """It was filled with verified bytes of that block, all but those from ``hole[0]`` up to ``hole[1]``."""
        self._holds, self._hole = (path, index), hole

    def part(self, path: Path, index: int, start: int, stop: int) -> memoryview | None:
        """Bytes of a block, if they are all here."""
        if self._holds != (path, index) or (start < self._hole[1] and self._hole[0] < stop):
            return None
        return memoryview(self._buffer)[start:stop]

    def forget(self) -> None:
        """Hold nothing."""
        self._holds = None


class RangedFile:
    """A data file of a checkpoint.

    Args:
        path: the file.
        entry: its size and hashes, from a manifest that was checked.
        scratch: shared by the files of a checkpoint.
        contents: says which tensors are damaged in a damaged byte range (for messages).
    """

    def __init__(
        self, path: Path, entry: FileEntry, scratch: Scratch, contents: Callable[[int, int], str]
    ) -> None:
        self.path, self._entry, self._scratch, self._contents = path, entry, scratch, contents
        self._verified = bytearray(max(len(entry.blocks), 1))
        self._handle: int | None = None
        self._header: dict[str, tuple[str, int, int]] | None = None

    def close(self) -> None:
        """Let go of the file descriptor; what was verified stays known."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def place(self, key: str) -> tuple[str, int, int] | None:
        """(dtype code, first byte, last byte + 1) of a stored tensor, from the file's own header; None: not there."""
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
            DamagedCheckpoint: a block that they lie in is not what was saved, or cannot be read.
        """
        stop, width = start + len(out), self._entry.block_bytes
        if not 0 <= start <= stop <= self._entry.size:
            raise ValueError(f"bytes {start} to {stop} of a file of {self._entry.size}")
        if not width:
            self._verify_whole()
            self._pread(start, out)
            return
        for index in range(start // width, -(-stop // width)):
            low, high = index * width, min((index + 1) * width, self._entry.size)
            a, z = max(low, start), min(high, stop)
            part = out[a - start : z - start]
            known = self._scratch.part(self.path, index, a - low, z - low) if self._verified[index] else None
            if known is not None:
                part[:] = known
            elif self._verified[index]:
                self._pread(a, part)
            elif (a, z) == (low, high):
                self._read_block(index, part)
            else:
                around = self._scratch.space(high - low)
                self._read_block(index, around[: a - low], part, around[z - low :])
                self._scratch.keep(self.path, index, (a - low, z - low))

    def faults(self) -> Iterator[str]:
        """Read and hash everything anew; yields what is wrong, one text a block."""
        entry = self._entry
        self._verified = bytearray(len(self._verified))
        self._header = None
        self._scratch.forget()
        if not entry.block_bytes:
            try:
                self._verify_whole()
            except DamagedCheckpoint as error:
                yield str(error)
            return
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
        if clean and whole.hexdigest() != entry.hash:
            yield f"{self.path}: every block matches its hash, the whole file does not: the manifest contradicts itself"

    def _verify_whole(self) -> None:
        """Version 1: no block hashes."""
        if self._verified[0]:
            return
        try:
            found = hash_file(self.path)
        except OSError as error:
            raise self._unreadable(error, 0, self._entry.size) from error
        if found != self._entry.hash:
            raise DamagedCheckpoint(
                f"{self.path}: its content does not match its hash ({found}, expected {self._entry.hash}): damaged is "
                f"one of {self._contents(0, self._entry.size)}"
            )
        self._verified[0] = 1

    def _read_block(self, index: int, *outs: memoryview) -> None:
        """Read a block into ``outs``, one after the other, and verify it."""
        at = low = index * self._entry.block_bytes
        digest = xxhash.xxh3_128()
        for out in outs:
            for start in range(0, len(out), CHUNK):
                part = out[start : start + CHUNK]
                self._pread(at, part)
                digest.update(part)
                at += len(part)
        found = digest.hexdigest()
        if found != self._entry.blocks[index]:
            raise DamagedCheckpoint(
                f"{self.path}: block {index} (bytes {low} to {at - 1}) does not match its hash ({found}, "
                f"expected {self._entry.blocks[index]}): damaged is {self._contents(low, at)}"
            )
        self._verified[index] = 1

    def _pread(self, start: int, out: memoryview) -> None:
        try:
            if self._handle is None:
                self._handle = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
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
