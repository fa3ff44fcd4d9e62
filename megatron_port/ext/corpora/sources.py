"""Input files as a stream of blocks: JSON, plain text and tables, compressed or not.

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
from typing import Any

import xxhash

from megatron_port.core.errors import DataError
from megatron_port.ext.corpora.columns import Piece, cells, json_values, texts
from megatron_port.ext.corpora.source_files import ReadOptions, Source
from megatron_port.ext.corpora.unpack import unfinished, unpacked

BLOCK_BYTES = 1 << 20
MAX_DOCUMENT_BYTES = 4 << 20
"""A plain-text document is cut at the next blank line after this, or at twice this at the next line end."""
LINES, TEXTS = "lines", "texts"
BYTES = " at byte "
"""Unit of plain text's places."""


@dataclass
class Block:
    """Records for one worker."""

    kind: str
    """lines: whole lines of JSON. texts: documents, one after the other."""
    payload: bytes
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    """(file and unit, number of the first record, records): its line (from 1), its row, or for plain text its byte.
    The first two make the place of a record in words."""
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
                stream = unpacked(source.packed, raw, source.path)
                read = {"jsonl": self._lines, "json": self._values, "text": self._texts}.get(source.kind, self._cells)
                yield from read(source, stream)
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
            yield Block(LINES, data, [(f"{where}:", number, 0)], dropped=dropped, position=self.bytes_read)
            number += data.count(b"\n")

    def _values(self, source: Source, stream: io.BufferedReader) -> Iterator[Block]:
        """JSON over several lines, as JSON lines."""
        held: list[bytes] = []
        first, size, unit = 1, 0, f"{source.path}, value "
        for value in json_values(stream, str(source.path), self.options.largest_record):
            held.append(value)
            size += len(value)
            if size >= BLOCK_BYTES:
                yield Block(LINES, b"\n".join(held), [(unit, first, 0)], position=self.bytes_read)
                held, first, size = [], first + len(held), 0
        if held:
            yield Block(LINES, b"\n".join(held), [(unit, first, 0)], position=self.bytes_read)

    # Plain text.

    def _texts(self, source: Source, stream: io.BufferedReader) -> Iterator[Block]:
        held: list[bytes] = []
        size = at = 0
        where = f"{source.path}{BYTES}"
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
        for piece in texts(source, self.options, BLOCK_BYTES):
            yield _rows(source, piece, before + int(piece[1] * size))

    def _cells(self, source: Source, stream: io.BufferedReader) -> Iterator[Block]:
        for piece in cells(source, stream, self.options, BLOCK_BYTES):
            yield _rows(source, piece, self.bytes_read)


def _rows(source: Source, piece: Piece, position: int) -> Block:
    first, _, payload, sizes = piece
    return Block(TEXTS, payload, [(f"{source.path}, row ", first, len(sizes))], sizes, position=position)


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
