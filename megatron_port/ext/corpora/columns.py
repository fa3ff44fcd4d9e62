"""The text column of Parquet and Arrow files, as packed bytes: no Python object is made for a row.

Conversations are nested, so their rows become JSON objects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from megatron_port.core.errors import DataError
from megatron_port.ext.corpora.extras import need
from megatron_port.ext.corpora.source_files import ReadOptions, Source
from megatron_port.ext.corpora.table_limit import TableLimit, check_parquet

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
