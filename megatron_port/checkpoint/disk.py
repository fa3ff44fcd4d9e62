"""Files of a checkpoint: regular ones only are read, whole ones only are written; disk errors say what to do."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

from megatron_port.errors import CheckpointError
from megatron_port.runtime.atomic import atomic_file

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


def open_regular(path: Path) -> int:
    """Open a regular file for reading; return the descriptor. Nothing else is opened: a pipe would wait for ever.

    A symbolic link is refused too: no save makes one, and where it leads may change.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    handle: int | None = None
    try:
        mode = os.lstat(path).st_mode  # before it is opened: opening a device may do something
        if stat.S_ISREG(mode):
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
            mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, f"it is {kind_of(mode)}, not a regular file", str(path))
    except OSError:
        if handle is not None:
            os.close(handle)
        raise
    assert handle is not None
    return handle


def kind_of(mode: int) -> str:
    """Name the kind of file that ``st_mode`` describes."""
    kinds = (
        (stat.S_ISREG, "a regular file"), (stat.S_ISDIR, "a directory"), (stat.S_ISLNK, "a symbolic link"),
        (stat.S_ISFIFO, "a pipe (FIFO)"), (stat.S_ISSOCK, "a socket"), (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    )
    return next((name for test, name in kinds if test(mode)), "a special file")


def write_chunks(path: Path, size: int, chunks: Iterable[memoryview | bytes]) -> None:
    """Write a whole file of ``size`` bytes, or none (:func:`megatron_port.runtime.atomic.atomic_file`).

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
