"""Columns of CSV and TSV files, one cell after the other, as ``columns`` gives those of Parquet."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from typing import Any

from megatron_port.core.errors import DataError
from megatron_port.ext.corpora.columns import Piece, check_names
from megatron_port.ext.corpora.source_files import ReadOptions, Source

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
