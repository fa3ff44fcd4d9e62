"""Files of a checkpoint: whole ones only are written; disk errors say what to do."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from megatron_port.core.errors import CheckpointError
from megatron_port.core.io.files import atomic_file

_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_RIGHTS = (errno.EACCES, errno.EPERM, errno.EROFS)


def free_bytes(path: Path) -> int | None:
    """Return the bytes free on the file system of ``path`` or its nearest existing parent; None if unknown."""
    for place in (path, *path.parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:
            continue
    return None


def disk_error(error: OSError, path: Path, needed: int | None = None) -> CheckpointError:
    """Return an error with the path, what was needed and what is free."""
    free = free_bytes(path)
    numbers = [f"needed {needed} bytes"] if needed is not None else []
    if free is not None:
        numbers.append(f"free {free} bytes")
    tail = f" ({', '.join(numbers)})" if numbers else ""
    if error.errno in _SPACE:
        advice = "free some space (or quota), lower checkpoint.keep, or choose another output_dir"
    elif error.errno in _RIGHTS:
        advice = "give this user write permission there, or choose another output_dir"
    else:
        advice = "look at the file system (df, mount, dmesg), or choose another output_dir"
    return CheckpointError(
        f"{path}: {error.strerror or error}{tail}. The previous checkpoints are untouched; {advice}"
    )


def write_chunks(path: Path, size: int, chunks: Iterable[memoryview | bytes]) -> None:
    """Write a whole file of ``size`` bytes, or none (:func:`megatron_port.core.io.files.atomic_file`).

    Nothing is begun where less than ``size`` is free: a full disk is not made fuller. The directory must exist: one
    that is gone was another attempt's to remove. Memory: one chunk.

    Raises:
        CheckpointError: the file system refused.
    """
    free = free_bytes(path.parent)
    if free is not None and free < size:
        raise disk_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), path, size)
    with atomic_file(path, parents=False, refused=lambda error: disk_error(error, path, size)) as stream:
        for chunk in chunks:
            stream.write(chunk)


def write_text(path: Path, text: str) -> int:
    """Write a whole file, or none. Returns its bytes.

    Raises:
        CheckpointError: the file system refused.
    """
    data = text.encode()
    write_chunks(path, len(data), [data])
    return len(data)
