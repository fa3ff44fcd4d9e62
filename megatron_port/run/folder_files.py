"""Files of a run's folder: new ones, of which one process writes each, files that grow by lines, and whether the folder
can be written at all."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from megatron_port.core.checkpoint.shard import free_bytes
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.errors import EnvironmentFault
from megatron_port.core.io.files import NEW, fsync_directory, kind_of
from megatron_port.core.train.folders import run_folder

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


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


def _write_exclusively(path: Path, data: bytes) -> None:
    """Write and sync a file; FileExistsError where it exists."""
    with os.fdopen(os.open(path, NEW, 0o666), "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


_PROBE = 1 << 16
"""Size of the write probe; it exceeds the slack of blocks that a full file system has already allocated."""


def check_output(config: RunConfig, trained: int) -> None:
    """Check the run's folder by writing and removing a file; rank 0 calls this before it meets the others.

    A folder that refuses would be found hours later, by the first save. ``trained``: the parameters that updates
    change. One checkpoint has a master and two moments of each, beside headers and manifest.

    Raises:
        EnvironmentFault: the folder cannot be made or written, or has no room for one checkpoint.
    """
    folder = run_folder(config)
    probe = folder / f".write-check-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with open(probe, "wb", buffering=0) as stream:
                written = stream.write(bytes(_PROBE))
                os.fsync(stream.fileno())
            if written != _PROBE:
                raise OSError(28, os.strerror(28))
        finally:
            with suppress(OSError):
                probe.unlink()
    except OSError as error:
        raise EnvironmentFault(
            f"{folder}: cannot be written ({error.strerror or error}), so nothing of this run could be saved; make "
            "room or give this user write permission there, or choose another output_dir"
        ) from error
    needed, free = 3 * (8 if config.precision.dtype == "fp64" else 4) * trained, free_bytes(folder)
    if free is not None and free < needed:
        raise EnvironmentFault(
            f"{folder}: {free} bytes are free, and one checkpoint of this run takes {needed}; make room, or choose "
            "another output_dir"
        )
