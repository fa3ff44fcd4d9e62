"""Compressed inputs as streams, known by their first bytes. None may unpack to more than text does."""

from __future__ import annotations

import gzip
import importlib
import io
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from megatron_port.core.errors import DataError
from megatron_port.ext.corpora.extras import MissingPackage, need

EXPANSION = 300
"""A compressed file, or a table, may unpack to this many times its size. Text compresses 3 to 20 times, and deflate at
most 1032."""
EXPANSION_FREE = 64 << 20
"""Unpacked bytes below which the ratio is not looked at."""
READ = 1 << 17
"""Compressed bytes read at a time."""
PACKINGS = {
    "gzip": (".gz", ".gzip"), "bzip2": (".bz2",), "xz": (".xz", ".lzma"), "zstd": (".zst", ".zstd"),
}
"""Compression → the suffixes that announce it."""


class Counted(Protocol):
    """A raw file that counts the bytes read of it."""

    count: int


def packing_of(head: bytes) -> str:
    """Return the compression that a file's first bytes show; empty: none."""
    magic = int.from_bytes(head[:4], "little")
    if head[:3] == b"\x1f\x8b\x08":
        return "gzip"
    if head[:3] == b"BZh" and head[4:10] in (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90"):
        return "bzip2"
    if head[:6] == b"\xfd7zXZ\0" or (head[:3] == b"]\0\0" and head[5:13] == b"\xff" * 8):
        return "xz"
    return "zstd" if magic == 0xFD2FB528 or (magic & 0xFFFFFFF0 == 0x184D2A50 and len(head) >= 8) else ""


def inner_suffix(name: str) -> tuple[str, str]:
    """Return (suffix, compression) that a file name announces, e.g. (".jsonl", "gzip"), whatever their case."""
    path = Path(name.lower())
    for packing, suffixes in PACKINGS.items():
        if path.suffix in suffixes:
            return Path(path.stem).suffix, packing
    return path.suffix, ""


def unpacked(packing: str, raw: Any, path: Path) -> io.BufferedReader:
    """Return the unpacked bytes of ``raw``, a :class:`Counted` raw file.

    Raises:
        DataError: when read, more than ``EXPANSION`` times the bytes of the file; at once, a zstd file that is cut
            off, or zstandard missing.
        zlib.error, EOFError: when read, a damaged file, whatever the library.
    """
    if not packing:
        return io.BufferedReader(raw, 1 << 20)
    inner, error = _opened(packing, io.BufferedReader(raw, READ), path)
    if packing == "zstd":
        check_frames(path)
    return io.BufferedReader(_Limited(inner, raw, path, error), 1 << 20)


def first_bytes(path: Path, packing: str, count: int) -> bytes:
    """Return the first ``count`` bytes of a file once unpacked.

    Raises:
        DataError: it cannot be unpacked.
    """
    with open(path, "rb") as file:
        if not packing:
            return file.read(count)
        inner, error = _opened(packing, file, path)
        data = b""
        try:
            while len(data) < count and (part := inner.read(count - len(data))):
                data += part
            return data
        except (error, EOFError, zlib.error, gzip.BadGzipFile) as fault:
            raise DataError(f"{path}: damaged or cut off ({fault}); copy it again") from fault


def _opened(packing: str, file: BinaryIO, path: Path) -> tuple[Any, type[Exception]]:
    """The stream of a library, and its error for damage beside zlib's, gzip's and EOFError."""
    if packing == "gzip":
        return gzip.GzipFile(fileobj=file), zlib.error
    if packing == "bzip2":
        return _Streams(file, _built_in("bz2", path).BZ2Decompressor, OSError), OSError
    if packing == "xz":
        lzma = _built_in("lzma", path)
        return _Streams(file, lzma.LZMADecompressor, lzma.LZMAError), lzma.LZMAError
    zstandard = need("zstandard", str(path))
    inner = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(file, read_across_frames=True)
    return inner, zstandard.ZstdError


def _built_in(name: str, path: Path) -> Any:
    """Import a module of the standard library that an interpreter may have been built without."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackage(f"{path}: this Python was built without {name}; unpack the file, or use another "
                             "Python") from error


class _Streams:
    """One compressed stream after another, as pbzip2 and ``cat`` write them. Raises EOFError, and the library's error.

    ``BZ2File`` and ``LZMAFile`` take a stream that does not begin well for garbage after the end: of a file with
    damage there, or with padding between its streams, the rest would be lost without a word.
    """

    def __init__(self, file: BinaryIO, new: Callable[[], Any], error: type[Exception]) -> None:
        self._file, self._new, self._error, self._stream, self._ahead = file, new, error, new(), b""
        self._begun = True
        """The stream has given something, or is the first."""

    def read(self, size: int) -> bytes:
        """Return at most ``size`` bytes; none at the end."""
        while True:
            if self._stream.eof:
                # Zeros fill up a block of a tape, and pad a stream of xz to four bytes.
                self._ahead = (self._stream.unused_data or self._ahead).lstrip(b"\0")
                while not self._ahead and (block := self._file.read(READ)):
                    self._ahead = block.lstrip(b"\0")
                if not self._ahead:
                    return b""
                self._stream, self._begun = self._new(), False
            elif self._stream.needs_input and not self._ahead:
                self._ahead = self._file.read(READ)
                if not self._ahead:
                    raise EOFError("it ends within a compressed stream")
            given, self._ahead = self._ahead, b""
            try:
                data: bytes = self._stream.decompress(given, size)
            except self._error as error:
                if self._begun:
                    raise
                raise self._error("what follows the end of a compressed stream is damaged, or no part of it") from error
            if data:
                self._begun = True
                return data


class _Limited(io.RawIOBase):
    """An unpacked stream that may not grow without bound; the ``error`` of its library becomes zlib's."""

    def __init__(self, inner: Any, raw: Counted, where: Path, error: type[Exception]) -> None:
        self._inner, self._raw, self._where, self._error = inner, raw, where, error
        self._out = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._inner.read(len(buffer))
        except self._error as error:
            raise zlib.error(str(error)) from error
        buffer[:len(data)] = data
        self._out += len(data)
        if self._out > EXPANSION_FREE and self._out > EXPANSION * self._raw.count:
            raise DataError(
                f"{self._where}: {self._raw.count} bytes have unpacked to {self._out}, more than {EXPANSION} times as "
                "many; text does not do that. Unpack it yourself if it is intended")
        return len(data)


def check_frames(path: Path) -> None:
    """DataError: a .zst file whose last frame is not whole, which the decoder would take for the end (RFC 8878)."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        at = 0
        while at < size:
            file.seek(at)
            head = file.read(18)
            magic = int.from_bytes(head[:4], "little")
            if magic & 0xFFFFFFF0 == 0x184D2A50:  # skippable
                at += 8 + int.from_bytes(head[4:8], "little") if len(head) >= 8 else size + 1
                continue
            if magic != 0xFD2FB528 or len(head) < 6:
                raise DataError(f"{path}: byte {at}: expected a zstd frame, found {head[:4].hex()}; copy it again")
            flags = head[4]
            single, checksum = flags >> 5 & 1, flags >> 2 & 1
            at += 5 + (1 - single) + (0, 1, 2, 4)[flags & 3] + (single, 2, 4, 8)[flags >> 6]
            last = 0
            while not last and at + 3 <= size:
                file.seek(at)
                block = int.from_bytes(file.read(3), "little")
                last, kind = block & 1, block >> 1 & 3
                at += 3 + (1 if kind == 1 else block >> 3)
            at += 4 * checksum
            if not last:
                at = size + 1
        if at > size:
            raise DataError(f"{path}: cut off: its last zstd frame does not end within the {size} bytes; copy it again")


def unfinished(data: bytes) -> int:
    """Return the number of bytes at the end that begin an incomplete UTF-8 character."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if back < length else 0
        if byte < 0x80:
            return 0
    return 0
