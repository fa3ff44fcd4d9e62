"""Input files as a stream of blocks: JSON lines, plain text, Parquet and Arrow, compressed or not.

A block is about a MB of whole records and says where they come from. Where blocks begin depends on the files and the
options alone, so an interrupted run finds the same blocks again. Memory is bounded whatever a file holds: a line that
does not end, a stream that unpacks to a thousand times its size and a damaged archive end with a message.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from megatron_port.data.columns import texts
from megatron_port.data.extras import need
from megatron_port.data.source_files import ReadOptions, Source
from megatron_port.errors import DataError

BLOCK_BYTES = 1 << 20
MAX_DOCUMENT_BYTES = 4 << 20
"""A plain-text document is cut at the next blank line after this, or at twice this at the next line end."""
EXPANSION = 300
"""A compressed file may unpack to this many times its size. Text compresses 3 to 20 times, and deflate at most 1032."""
EXPANSION_FREE = 64 << 20
"""Unpacked bytes below which the ratio is not looked at."""

LINES, TEXTS = "lines", "texts"


@dataclass
class Block:
    """Records for one worker."""

    kind: str
    """lines: whole lines of JSON. texts: documents, one after the other."""
    payload: bytes
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    """(file, number of the first record, records): its line (from 1), its row, or for plain text its byte."""
    sizes: list[int] = field(default_factory=list)
    """Bytes of each text; -1: a missing value."""
    dropped: list[str] = field(default_factory=list)
    """Records that were left out while reading (only where that was asked for)."""
    position: int = 0
    """Bytes of the input files read so far."""


class Reader:
    """Reader of the blocks of a list of files, with a hash over the files' bytes.

    ``source_hash``: xxh3-128 of the files as they are on disk, in order; complete after the last block.
    """

    def __init__(self, sources: Sequence[Source], options: ReadOptions) -> None:
        self.sources, self.options = list(sources), options
        self.source_hash = xxhash.xxh3_128()
        self.bytes_read = 0
        self.total = sum(source.path.stat().st_size for source in self.sources)

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks in order of the files. Raises DataError at unreadable input."""
        held = Block(TEXTS, b"")
        parts: list[bytes] = []
        size = 0
        for source in self.sources:
            for block in self._of(source):
                if block.kind == TEXTS and len(block.payload) + size < BLOCK_BYTES:
                    # Small files share a block.
                    parts.append(block.payload)
                    size += len(block.payload)
                    held.spans += block.spans
                    held.sizes += block.sizes
                    held.position = block.position
                    continue
                if parts:
                    held.payload = b"".join(parts)
                    yield held
                    held, parts, size = Block(TEXTS, b""), [], 0
                yield block
        if parts:
            held.payload = b"".join(parts)
            yield held

    def _of(self, source: Source) -> Iterator[Block]:
        try:
            if source.kind in ("parquet", "arrow"):
                yield from self._columns(source)
                return
            with open(source.path, "rb", buffering=0) as file:
                raw = _Counted(file, self)
                stream = _unpacked(source, raw)
                yield from (self._lines if source.kind == "json" else self._texts)(source, stream)
                raw.drain()
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{source.path}: damaged or cut off after {self.bytes_read} bytes read ({error}); "
                            "copy it again") from error
        except OSError as error:
            raise DataError(f"{source.path}: {error.strerror or error}") from error

    # JSON lines.

    def _lines(self, source: Source, stream: io.BufferedReader) -> Iterator[Block]:
        number, where, limit = 1, str(source.path), self.options.largest_record
        while data := stream.read(BLOCK_BYTES):
            dropped: list[str] = []
            if not data.endswith(b"\n"):
                begun = len(data) - (data.rfind(b"\n") + 1)
                rest = stream.readline(max(limit - begun, 0) + 1)
                if begun + len(rest) > limit:
                    line = number + data.count(b"\n")
                    if not self.options.leave_out:
                        raise DataError(
                            f"{where}:{line}: a line of more than {limit} bytes; raise --largest-record if it is "
                            "meant, or leave it out with --bad-input skip")
                    dropped.append(f"{where}:{line}: a line of more than {limit} bytes")
                    data, rest = data[:len(data) - begun] + b"\n", b""
                    while (more := stream.readline(BLOCK_BYTES)) and not more.endswith(b"\n"):
                        pass
                data += rest
            yield Block(LINES, data, [(where, number, 0)], dropped=dropped, position=self.bytes_read)
            number += data.count(b"\n")

    # Plain text.

    def _texts(self, source: Source, stream: io.BufferedReader) -> Iterator[Block]:
        held: list[bytes] = []
        size = at = 0
        where = str(source.path)
        for document in plain_documents(stream, self.options.blank_lines):
            if held and size + len(document) > BLOCK_BYTES:
                yield Block(TEXTS, b"".join(held), [(where, at, len(held))], [len(d) for d in held],
                            position=self.bytes_read)
                at, held, size = at + size, [], 0
            held.append(document)
            size += len(document)
        if held:
            yield Block(TEXTS, b"".join(held), [(where, at, len(held))], [len(d) for d in held],
                        position=self.bytes_read)

    # Columns.

    def _columns(self, source: Source) -> Iterator[Block]:
        before = self.bytes_read
        size = source.path.stat().st_size
        with open(source.path, "rb", buffering=0) as file:
            raw = _Counted(file, self)
            raw.drain()
        for row, share, payload, sizes in texts(source, self.options, BLOCK_BYTES):
            yield Block(TEXTS, payload, [(str(source.path), row, len(sizes))], sizes,
                        position=before + int(share * size))


class _Counted(io.RawIOBase):
    """A file whose bytes are hashed and counted as they pass."""

    def __init__(self, file: io.RawIOBase | Any, reader: Reader) -> None:
        self._file, self._reader = file, reader
        self.count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer) or 0
        self._reader.source_hash.update(memoryview(buffer)[:count])
        self._reader.bytes_read += count
        self.count += count
        return count

    def drain(self) -> None:
        """Read what is left, for the hash."""
        buffer = bytearray(1 << 20)
        while self.readinto(buffer):
            pass


class _Limited(io.RawIOBase):
    """An unpacked stream that may not grow without bound; the ``error`` of its library becomes zlib's."""

    def __init__(self, inner: Any, raw: _Counted, where: Path, error: type[Exception] = zlib.error) -> None:
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


def _unpacked(source: Source, raw: _Counted) -> io.BufferedReader:
    if not source.packed:
        return io.BufferedReader(raw, 1 << 20)
    if source.packed == ".gz":
        unzipped = gzip.GzipFile(fileobj=io.BufferedReader(raw, 1 << 17))
        return io.BufferedReader(_Limited(unzipped, raw, source.path), 1 << 20)
    zstandard = need("zstandard", str(source.path))
    check_frames(source.path)
    inner = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(raw, read_across_frames=True)
    return io.BufferedReader(_Limited(inner, raw, source.path, zstandard.ZstdError), 1 << 20)


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


def plain_documents(stream: Any, blank_lines: int) -> Iterator[bytes]:
    """The documents of a plain-text file; together they are the file. Memory stays bounded for files of any size."""
    held: list[bytes] = []
    size = blanks = 0
    while line := stream.readline(MAX_DOCUMENT_BYTES):
        if not line.strip() and line.endswith(b"\n"):
            blanks += 1
        else:
            rule = bool(blank_lines) and blanks >= blank_lines
            large = size >= MAX_DOCUMENT_BYTES and (blanks > 0 or size >= 2 * MAX_DOCUMENT_BYTES)
            if held and (rule or large):
                data = b"".join(held)
                # A bounded readline may have stopped inside a character; carry its bytes over.
                keep = 0 if data.endswith(b"\n") else unfinished(data)
                rest = data[len(data) - keep:]
                yield data[:len(data) - keep]
                held, size = [rest] if rest else [], len(rest)
            blanks = 0
        held.append(line)
        size += len(line)
    if held:
        yield b"".join(held)


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
