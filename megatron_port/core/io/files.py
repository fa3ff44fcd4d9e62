"""Files that are either whole or absent: written under a temporary name, synced to disk, renamed.

Every file that the package replaces is written here. A reader, or whoever comes after a crash, finds the old content
or the new one, never a part of it; a write that fails leaves the old file and no temporary one.
"""

from __future__ import annotations

import errno
import os
import resource
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from megatron_port.core.errors import EnvironmentFault

# Read regular files only: opening a pipe in place of a file would wait for ever.

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


NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
"""Flags of a file that must not be there yet."""


@contextmanager
def atomic_file(
    path: Path, *, mode: int = 0o666, durable: bool = True, parents: bool = True,
    guard: Callable[[], None] | None = None, refused: Callable[[OSError], Exception] | None = None,
) -> Iterator[BinaryIO]:
    """Open a binary file that takes the name ``path`` when the block ends, and vanishes when the block fails.

    Args:
        mode: permissions of the file; the umask is taken off.
        durable: sync the file and its directory. Without, a crash of the machine may leave an empty file.
        parents: make the directories above. Without, a missing directory is an error.
        guard: called when everything is on disk and nothing has its name yet; what it raises ends the write. Writers
            into a run folder pass the check of its lease (:meth:`megatron_port.core.dist.rank.Fence.check`).
        refused: makes the error to raise of an OSError; called before the temporary file is removed.

    Raises:
        OSError: the file system refused, and ``refused`` is not given.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(part, NEW, mode), "wb") as stream:
            yield stream
            stream.flush()
            if durable:
                os.fsync(stream.fileno())
        if guard is not None:
            guard()
        os.replace(part, path)
        if durable:
            fsync_directory(path.parent)
    except BaseException as error:
        problem = refused(error) if refused is not None and isinstance(error, OSError) else error
        with suppress(OSError):
            os.unlink(part)
        if problem is error:
            raise
        raise problem from error


def write_bytes(
    path: Path, data: bytes, *, mode: int = 0o666, durable: bool = True, guard: Callable[[], None] | None = None
) -> None:
    """Write ``data`` to ``path``; options and errors of :func:`atomic_file`."""
    with atomic_file(path, mode=mode, durable=durable, guard=guard) as stream:
        stream.write(data)


def write_text(
    path: Path, text: str, *, mode: int = 0o666, durable: bool = True, guard: Callable[[], None] | None = None
) -> None:
    """Write ``text`` in UTF-8 to ``path``; options and errors of :func:`atomic_file`."""
    write_bytes(path, text.encode(), mode=mode, durable=durable, guard=guard)


def write_output(path: Path, text: str, *, mode: int = 0o666, advice: str = "") -> None:
    """Write ``text`` to a path that the user gave.

    Raises:
        EnvironmentFault: the file system refused; the message ends with ``advice``.
    """
    def fault(error: OSError) -> EnvironmentFault:
        tail = f"; {advice}" if advice else ""
        return EnvironmentFault(f"{path} cannot be written: {error.strerror or error}{tail}")

    with atomic_file(path, mode=mode, refused=fault) as stream:
        stream.write(text.encode())


def fsync_file(path: Path) -> None:
    """Make the content of a file that others wrote durable. Raises OSError."""
    _fsync(path, os.O_RDONLY)


def fsync_directory(path: Path) -> None:
    """Make renames and new names in a directory durable. Raises OSError."""
    try:
        _fsync(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that has no such call
            raise


def _fsync(path: Path, flags: int) -> None:
    handle = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# The limit on open files of a process: a login shell's is often 1024, and the hard one is far above.

SPARE = 512
"""Files beside those that were counted: sockets, pipes, libraries, logs."""


def free_bytes(path: Path) -> int | None:
    """Return the bytes free on the file system of ``path`` or its nearest existing parent; None if unknown."""
    for place in (path, *path.parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:
            continue
    return None


def allow_open_files(count: int) -> None:
    """Raise the soft limit so that ``count`` more files can be open, as far as the hard limit lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + SPARE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def too_many_open(error: OSError) -> str:
    """Return what to do about an error of opening a file where the limit is its cause; empty: it is not."""
    if error.errno != errno.EMFILE:
        return ""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (f"this process may have {soft} files open, and {len(os.listdir('/dev/fd'))} are; raise the limit "
            f"(ulimit -n, hard limit {hard}), or join corpora")


# Who may read and write what a run leaves behind: what the user's umask says, and never everybody may write.

EVERYBODY_WRITES = 0o002


def tighten() -> None:
    """Nothing that this process or its children make can be written by everybody, whatever umask it was given.

    Containers and batch systems start with umask 0 now and then; a checkpoint that anybody can replace is one that
    anybody can poison. Group and readers are left to the user's umask (077 keeps all of a run to oneself).
    """
    os.umask(os.umask(0o077) | EVERYBODY_WRITES)
