"""Durable files: temporary name, fsync, rename; and disk errors that say what to do."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from megatron_port.errors import CheckpointError


def free_bytes(path: Path) -> int | None:
    """Bytes free on the file system of ``path`` or of its nearest existing parent; None if it cannot be asked."""
    for place in (path, *path.parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:
            continue
    return None


def disk_error(error: OSError, path: Path, needed: int | None = None) -> CheckpointError:
    """A message with the path, what was needed and what is free."""
    free = free_bytes(path)
    numbers = [f"needed {needed} bytes"] if needed is not None else []
    if free is not None:
        numbers.append(f"free {free} bytes")
    tail = f" ({', '.join(numbers)})" if numbers else ""
    return CheckpointError(
        f"{path}: {error.strerror or error}{tail}. The previous checkpoints are untouched; "
        "free some space, lower checkpoint.keep, or choose another output_dir"
    )


def fsync_directory(path: Path) -> None:
    """Make renames and new names in a directory durable."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> int:
    """Write a whole file under a temporary name, fsync, rename. Returns its bytes.

    Raises:
        CheckpointError: the file system refused.
    """
    data = text.encode()
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, path)
    except OSError as error:
        raise disk_error(error, path, len(data)) from error
    return len(data)
