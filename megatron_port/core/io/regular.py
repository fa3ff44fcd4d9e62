"""Read regular files only: opening a pipe in place of a file would wait for ever."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_regular(path: Path, *, follow: bool = False) -> int:
    """Open a regular file for reading; return the descriptor. Nothing else is opened: a pipe would wait for ever.

    Args:
        follow: a symbolic link stands for the file that it leads to. Without, it is refused: no save of a checkpoint
            makes one, and where it leads may change.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    handle: int | None = None
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        mode = os.stat(path, follow_symlinks=follow).st_mode  # before it is opened: opening a device may do something
        if stat.S_ISREG(mode):
            handle = os.open(path, flags)
            mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, f"it is {kind_of(mode)}, not a regular file", str(path))
    except ValueError as error:  # a null byte in the name
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    except OSError:
        if handle is not None:
            os.close(handle)
        raise
    assert handle is not None
    return handle


def read_regular(path: Path, most: int) -> bytes:
    """Return a file's bytes; of a regular file, or one that a link leads to.

    Raises:
        OSError: it cannot be read, is no regular file, or has more than ``most`` bytes.
    """
    with open(open_regular(path, follow=True), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        data = stream.read(most + 1) if size <= most else b""
    if size > most or len(data) > most:
        raise OSError(errno.EFBIG, f"it has {max(size, len(data))} bytes; such a file has at most {most}", str(path))
    return data


def kind_of(mode: int) -> str:
    """Name the kind of file that ``st_mode`` describes."""
    kinds = (
        (stat.S_ISREG, "a regular file"), (stat.S_ISDIR, "a directory"), (stat.S_ISLNK, "a symbolic link"),
        (stat.S_ISFIFO, "a pipe (FIFO)"), (stat.S_ISSOCK, "a socket"), (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    )
    return next((name for test, name in kinds if test(mode)), "a special file")
