"""Files that are either whole or absent: written under a temporary name, synced to disk, renamed.

Every file that the package replaces is written here. A reader, or whoever comes after a crash, finds the old content
or the new one, never a part of it; a write that fails leaves the old file and no temporary one.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from megatron_port.core.errors import EnvironmentFault
from megatron_port.core.io.regular import kind_of

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


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
            into a run folder pass the check of its lease (:meth:`megatron_port.core.dist.lease.Fence.check`).
        refused: makes the error to raise of an OSError; called before the temporary file is removed.

    Raises:
        OSError: the file system refused, and ``refused`` is not given.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(part, _NEW, mode), "wb") as stream:
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


def write_new(path: Path, data: bytes) -> bool:
    """Write a file that does not exist yet; return False, and change nothing, where it does.

    Of several processes that try, on one machine or on several, exactly one succeeds. Raises OSError.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        _write_exclusively(part, data)
        try:
            os.link(part, path)
        except FileExistsError:
            # NFS repeats a request whose answer was lost: two names mean that it was done.
            if os.stat(part).st_nlink != 2:
                return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            try:
                _write_exclusively(path, data)
            except FileExistsError:
                return False
        fsync_directory(path.parent)
        return True
    finally:
        with suppress(OSError):
            os.unlink(part)


def append_line(path: Path, line: str, *, durable: bool = True) -> None:
    """Append a line to a regular file, which is made where it is not there, with one call of the system.

    Raises:
        OSError: the file system refused, or something else is in its place: to write to a pipe would be to wait.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
    with os.fdopen(os.open(path, flags, 0o666), "ab", buffering=0) as stream:
        mode = os.fstat(stream.fileno()).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, f"it is {kind_of(mode)}, not a regular file", str(path))
        stream.write(line.encode() + b"\n")
        if durable:
            os.fsync(stream.fileno())


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


def _write_exclusively(path: Path, data: bytes) -> None:
    """Write and sync a file; FileExistsError where it exists."""
    with os.fdopen(os.open(path, _NEW, 0o666), "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
