"""Limit on what a table unpacks to: a few kilobytes of Parquet or Arrow can hold gigabytes of one repeated text."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_port.core.errors import DataError
from megatron_port.ext.corpora.unpack import EXPANSION, EXPANSION_FREE


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
