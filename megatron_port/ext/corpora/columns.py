"""The text column of Parquet and Arrow files, as packed bytes: no Python object is made for a row.

Conversations are nested, so their rows become JSON objects.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatron_port.core.errors import DataError, shortened
from megatron_port.ext.corpora.source_files import ReadOptions, Source
from megatron_port.ext.corpora.unpack import EXPANSION, EXPANSION_FREE, need

# Limit on what a table unpacks to: a few kilobytes of Parquet or Arrow can hold gigabytes of one repeated text.

class TableLimit:
    """Counter of a file's unpacked bytes. ``add`` raises DataError when they are too many."""

    def __init__(self, path: Path) -> None:
        self.path, self.size, self.total = path, path.stat().st_size, 0

    def add(self, count: int) -> None:
        """Count unpacked bytes. Raises DataError."""
        self.total += count
        if self.total > EXPANSION_FREE and self.total > EXPANSION * self.size:
            raise DataError(
                f"{self.path}: {self.size} bytes unpack to {self.total} or more, more than {EXPANSION} times as many; "
                "text does not do that. Write it as JSON lines if it is intended")


def check_parquet(path: Path, metadata: Any, columns: Iterable[str]) -> None:
    """Check the sizes that a Parquet file's own metadata gives for some columns, before any is read. Raises
    DataError."""
    limit, wanted = TableLimit(path), set(columns)
    for group in range(metadata.num_row_groups):
        part = metadata.row_group(group)
        for number in range(part.num_columns):
            column = part.column(number)
            if column.path_in_schema.split(".")[0] in wanted:
                limit.add(column.total_uncompressed_size)


ROWS = 1024
"""Rows that are decoded at once."""

Piece = tuple[int, float, bytes, list[int]]
"""(first row, share of the file read so far, the texts one after the other, bytes of each; -1: null)."""


def texts(source: Source, options: ReadOptions, block_bytes: int) -> Iterator[Piece]:
    """Yield the texts of a file in pieces of about ``block_bytes``.

    Raises:
        DataError: not such a file, no such column, a column of another type, a text that is too large.
    """
    pyarrow = need("pyarrow", str(source.path))
    try:
        held: list[bytes] = []
        sizes: list[int] = []
        first = row = 0
        limit = TableLimit(source.path)
        for share, column in (_parquet if source.kind == "parquet" else _arrow)(source, options):
            limit.add(column.nbytes)
            for data, part in _cut(column, pyarrow, source, options, row, block_bytes):
                held.append(data)
                sizes += part
                row += len(part)
                if sum(map(len, held)) >= block_bytes:
                    yield first, share, b"".join(held), sizes
                    held, sizes, first = [], [], row
        if sizes:
            yield first, 1.0, b"".join(held), sizes
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{source.path}: not a readable {source.kind} file ({str(error).splitlines()[0]})") from error


def _parquet(source: Source, options: ReadOptions) -> Iterator[tuple[float, Any]]:
    import pyarrow.parquet as parquet

    # Buffered, page by page: a row group may be larger than memory.
    with parquet.ParquetFile(source.path, pre_buffer=False, buffer_size=1 << 20) as file:
        columns = _columns(source, file.schema_arrow, options)
        check_parquet(source.path, file.metadata, columns)
        rows, done = max(file.metadata.num_rows, 1), 0
        for batch in file.iter_batches(batch_size=ROWS, columns=columns):
            done += batch.num_rows
            yield done / rows, _records(batch, columns, options)


def _arrow(source: Source, options: ReadOptions) -> Iterator[tuple[float, Any]]:
    pyarrow = need("pyarrow", str(source.path))
    with pyarrow.memory_map(str(source.path)) as mapped:
        size = max(mapped.size(), 1)
        head = mapped.read(6)
        mapped.seek(0)
        if head == b"ARROW1":
            with pyarrow.ipc.open_file(mapped) as file:
                columns = _columns(source, file.schema, options)
                for i in range(file.num_record_batches):
                    yield (i + 1) / file.num_record_batches, _records(file.get_batch(i), columns, options)
        else:
            with pyarrow.ipc.open_stream(mapped) as stream:
                columns = _columns(source, stream.schema, options)
                for batch in stream:
                    yield mapped.tell() / size, _records(batch, columns, options)


def _records(batch: Any, columns: list[str], options: ReadOptions) -> Any:
    """The text column, or a column of JSON objects of the columns."""
    if options.fields is None:
        return batch.column(columns[0])
    pyarrow = need("pyarrow", "conversations in tables")
    parts = []
    for start in range(0, batch.num_rows, ROWS):
        rows = batch.select(columns).slice(start, ROWS).to_pylist()
        parts.append(pyarrow.array([_object(row) for row in rows], pyarrow.large_binary()))
    return pyarrow.concat_arrays(parts) if parts else pyarrow.array([], pyarrow.large_binary())


def _object(row: dict[str, Any]) -> bytes:
    """A row as a JSON object. Binary cells are texts; where one is not UTF-8, neither is the object."""
    return json.dumps(row, default=_plain, ensure_ascii=False).encode("utf-8", "surrogateescape")


def _plain(value: object) -> str:
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)


def check_names(source: Source, names: list[str], options: ReadOptions) -> list[str]:
    """Return the columns to read of those that a file has: the text's, or those of conversations.

    Raises:
        DataError: it has none of them, or two of one name.
    """
    shown = ", ".join(str(name)[:40] for name in names[:20])
    if options.fields is not None:
        found = options.fields.columns(names)
        if not found:
            raise DataError(f"{source.path}: no column of conversations ({', '.join(options.fields.keys)}); it has "
                            f"{shown}: --json-key, or --chat-fields QUESTION ANSWER")
    elif options.key in names:
        found = [options.key]
    else:
        raise DataError(f"{source.path}: no column {options.key!r}; it has {shown}: --json-key")
    for name in found:
        if names.count(name) > 1:
            raise DataError(f"{source.path}: {names.count(name)} columns are called {name!r}; rename all but one")
    return found


def _columns(source: Source, schema: Any, options: ReadOptions) -> list[str]:
    """The columns to read: the text's, or those of conversations. Raises DataError."""
    import pyarrow.types as types

    found = check_names(source, list(schema.names), options)
    kind = schema.field(found[0]).type
    inner = kind.value_type if types.is_dictionary(kind) else kind
    text = (types.is_string, types.is_large_string, types.is_string_view, types.is_binary, types.is_large_binary,
            types.is_binary_view)
    if options.fields is None and not any(is_text(inner) for is_text in text):
        raise DataError(f"{source.path}: column {found[0]!r} is of type {kind}, not text; name another: --json-key")
    return found


def _cut(column: Any, pyarrow: Any, source: Source, options: ReadOptions, row: int,
         block_bytes: int) -> Iterator[tuple[bytes, list[int]]]:
    """A column in pieces: (bytes, sizes)."""
    for start in range(0, len(column), ROWS):
        part = column.slice(start, ROWS).cast(pyarrow.large_binary())
        missing = np.asarray(part.is_null()) if part.null_count else None
        if missing is not None:
            part = part.fill_null(b"")  # a null may have bytes under it
        _, offsets, data = part.buffers()
        ends = np.frombuffer(offsets, dtype=np.int64)[part.offset:part.offset + len(part) + 1]
        sizes = np.diff(ends)
        if missing is not None:
            sizes[missing] = -1
        large = np.flatnonzero(sizes > options.largest_record)
        if large.size and not options.leave_out:
            at = int(large[0])
            raise DataError(f"{source.path}, row {row + start + at}: a text of {int(sizes[at])} bytes, more than "
                            f"{options.largest_record}; raise --largest-record if it is meant, or leave it out with "
                            "--bad-input skip")
        view = memoryview(data) if data is not None else memoryview(b"")
        begin = 0
        while begin < len(sizes):
            # At least one row; as many as make a block.
            end = begin + 1
            while end < len(sizes) and ends[end + 1] - ends[begin] <= block_bytes:
                end += 1
            if int(ends[end] - ends[begin]) > options.largest_record and end == begin + 1:
                yield b"", [-1]  # too large, and to be left out
            else:
                yield bytes(view[int(ends[begin]):int(ends[end])]), [int(s) for s in sizes[begin:end]]
            begin = end


# Columns of CSV and TSV files, one cell after the other, as ``columns`` gives those of Parquet.

DELIMITERS = {"csv": ",;|\t", "tsv": "\t"}
"""Format → delimiters; that by which the header has the column is taken."""


def cells(source: Source, stream: Any, options: ReadOptions, block_bytes: int) -> Iterator[Piece]:
    """Yield the texts of a column in pieces of about ``block_bytes``; rows count from 1 after the header.

    Quotes are those of RFC 4180, and cells may hold line ends. Bytes that are not UTF-8 are kept as they are.

    Raises:
        DataError: no such column, two of that name, a row of another number of cells, quotes that do not match, a
            text that is too large.
    """
    limit = options.largest_record
    before = csv.field_size_limit(max(4 * limit, 1 << 17))
    try:
        lines = _lines(source, stream, 4 * limit)
        header = next(lines, "")
        delimiter = _delimiter(source, header, options)
        rows = csv.reader(_joined(header, lines), delimiter=delimiter, strict=True)
        names = next(rows, [])
        columns = check_names(source, names, options)
        held: list[bytes] = []
        sizes: list[int] = []
        first = row = 1
        size = 0
        for row, record in enumerate(rows, 1):
            if not record:  # an empty line
                data: bytes | None = b""
            elif len(record) != len(names):
                raise DataError(f"{source.path}, row {row}: {len(record)} cells, and the header has {len(names)}; "
                                "quote cells with delimiters in them")
            else:
                data = _bytes(record, names, columns, options)
                if len(data) > limit:
                    if not options.leave_out:
                        raise DataError(f"{source.path}, row {row}: a text of {len(data)} bytes, more than {limit}; "
                                        "raise --largest-record if it is meant, or leave it out with --bad-input skip")
                    data = None
            held.append(data or b"")
            sizes.append(-1 if data is None else len(data))
            size += len(held[-1])
            if size >= block_bytes:
                yield first, 0.0, b"".join(held), sizes
                held, sizes, first, size = [], [], row + 1, 0
        if sizes:
            yield first, 1.0, b"".join(held), sizes
    except csv.Error as error:
        raise DataError(f"{source.path}, near row {row + 1}: not readable as {source.kind.upper()} ({error}); quote it "
                        "as RFC 4180 does") from error
    finally:
        csv.field_size_limit(before)


def _lines(source: Source, stream: Any, limit: int) -> Iterator[str]:
    number = 1
    while line := stream.readline(limit):
        if len(line) >= limit and not line.endswith(b"\n"):
            raise DataError(f"{source.path}:{number}: a line of more than {limit} bytes")
        text = line.decode("utf-8", "surrogateescape")
        yield text.removeprefix("\ufeff") if number == 1 else text
        number += 1


def _joined(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


def _delimiter(source: Source, header: str, options: ReadOptions) -> str:
    for delimiter in DELIMITERS[source.kind]:
        names = next(csv.reader([header], delimiter=delimiter), [])
        if (options.fields.columns(names) if options.fields else options.key in names):
            return delimiter
    return max(DELIMITERS[source.kind], key=header.count)


def _bytes(record: list[str], names: list[str], columns: list[str], options: ReadOptions) -> bytes:
    """The text of a row, or a JSON object of its columns."""
    if options.fields is None:
        return record[names.index(columns[0])].encode("utf-8", "surrogateescape")
    row = {name: record[names.index(name)] for name in columns}
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogateescape")


# JSON that is not one record per line: an array, or values over several lines. Memory is bounded by one value.

READ = 1 << 20
_SPACE = re.compile(r"[ \t\n\r]*")
_UNFINISHED = 32
"""An error this close to the end of what was read may be a value that was cut there."""


def json_values(stream: Any, where: str, largest: int) -> Iterator[bytes]:
    """Yield each element of the array that a file is, or each of its values, as a line without its end.

    Bytes that are not UTF-8 are kept as they are.

    Raises:
        DataError: not JSON, with the line; a value of more than about ``largest`` bytes.
    """
    text = _Window(stream)
    array = text.skip_space() == "["
    if array:
        text.at += 1
    first = True
    while True:
        character = text.skip_space()
        if array and character == "]":
            text.at += 1
            array, character = False, text.skip_space()
            if character:
                raise DataError(f"{where}:{text.line()}: more text after the end of the array")
        if not character:
            if array:
                raise DataError(f"{where}:{text.line()}: the array does not end; the file is cut off")
            return
        if array and not first:
            if character != ",":
                raise DataError(f"{where}:{text.line()}: expected a comma or the end of the array")
            text.at += 1
            text.skip_space()
        first = False
        yield text.value(where, largest)


class _Window:
    """The part of a stream that is being parsed, as text."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._json = json.JSONDecoder()
        self._lines = 1
        self.text, self.at, self.ended = "", 0, False
        self._read(READ)
        self.at = int(self.text.startswith("\ufeff"))

    def skip_space(self) -> str:
        """Move to the next character that is no white space, and return it; empty: the end."""
        while True:
            self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.text) or self.ended:
                return self.text[self.at:self.at + 1]
            self._read(READ)

    def value(self, where: str, largest: int) -> bytes:
        """Return the value that begins here."""
        while True:
            try:
                _, end = self._json.raw_decode(self.text, self.at)
                if end < len(self.text) or self.ended:
                    break
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated string") or error.pos + _UNFINISHED > len(self.text)
                if self.ended or not cut:
                    raise DataError(f"{where}:{self.line(error.pos)}: not JSON ({error.msg}); repair the file"
                                    ) from None
            except (RecursionError, ValueError) as error:  # ValueError: an integer of thousands of digits
                raise DataError(f"{where}:{self.line()}: a value that cannot be read ({shortened(str(error), 120)})"
                                ) from None
            if len(self.text) - self.at > largest:
                raise DataError(f"{where}:{self.line()}: a value of more than {largest} bytes, or a string without an "
                                "end; raise --largest-record if it is meant")
            self._read(max(READ, len(self.text) - self.at))  # twice as much: the parser begins anew
        raw = self.text[self.at:end].encode("utf-8", "surrogateescape")
        self.at = end
        return raw.replace(b"\n", b" ").replace(b"\r", b" ")  # no string holds them

    def line(self, position: int | None = None) -> int:
        """Return the line of a position in the window."""
        return self._lines + self.text.count("\n", 0, self.at if position is None else position)

    def _read(self, count: int) -> None:
        data = self._stream.read(count)
        self.ended = not data
        self._lines += self.text.count("\n", 0, self.at)
        self.text, self.at = self.text[self.at:] + self._decoder.decode(data, self.ended), 0
