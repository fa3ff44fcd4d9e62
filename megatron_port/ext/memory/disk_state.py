"""Optimizer state on a disk: one file of fixed size per rank and kind, read and written by threads.

The files are scratch. They are unlinked as soon as they are open, so that a process that dies, however, leaves nothing
behind and nothing that could be taken for a checkpoint. All their blocks are allocated before training begins: a disk
that is too small is an error at the start. Reads and writes bypass the page cache (``O_DIRECT``) where the file system
takes that. What looks at the state between steps (checkpoints, hashes) does so through a mapping of the same file.
"""

from __future__ import annotations

import errno
import mmap
import os
import uuid
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_port.core.errors import EnvironmentFault
from megatron_port.core.optim.rules import StateKind
from megatron_port.ext.memory.swap import ALIGN


def aligned(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to a multiple of ``ALIGN``."""
    return -(-nbytes // ALIGN) * ALIGN


class StateFile:
    """File of one kind of state.

    Args:
        folder: on a local disk; it is made where it does not exist.
        nbytes: size of the file, a multiple of ``ALIGN``.
        what: the kind of state, for messages.

    Raises:
        EnvironmentFault: the folder cannot be written, or the disk has not so much space.
    """

    def __init__(self, folder: Path, nbytes: int, what: str) -> None:
        self.folder, self.nbytes, self.what = folder, nbytes, what
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = self._allocated(folder / f"state-{uuid.uuid4().hex}")
            self._map = mmap.mmap(handle, nbytes)
        except OSError as error:
            raise self._refused(error) from error
        weakref.finalize(self, os.close, handle)

    def _allocated(self, path: Path) -> int:
        """Open the file twice, allocate its blocks and unlink it; return the descriptor that uses the page cache."""
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                self._direct = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
                self.bypasses_cache = True
            except OSError:  # EINVAL: a file system in memory or on the network
                self._direct = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                self.bypasses_cache = False
            weakref.finalize(self, os.close, self._direct)
            os.unlink(path)
            os.posix_fallocate(handle, 0, self.nbytes)
        except BaseException:
            os.close(handle)
            path.unlink(missing_ok=True)
            raise
        return handle

    def _refused(self, error: OSError) -> EnvironmentFault:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM):
            advice = ("this rank alone needs so much for each kind of state, and its node as much for each of its "
                      "ranks; free some space, lower offload.fraction, or choose another offload.nvme_path")
        else:
            advice = "choose a folder on a local disk that this user may write as offload.nvme_path"
        return EnvironmentFault(
            f"offload.nvme_path {self.folder}: no {self.nbytes} bytes for {self.what}: {error.strerror or error}; "
            f"{advice}"
        )

    def mapped(self, offset: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return ``numel`` elements from byte ``offset`` on as a view of the file, for whoever is not in a hurry.

        No read or write of these bytes may be under way while the view is used.
        """
        if not numel:
            return torch.zeros(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset)

    def forget_pages(self) -> None:
        """Unmap the pages that views have touched; the next look reads them again."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def flush(self) -> None:
        """Write what views have changed to the file."""
        self._map.flush()

    def read(self, offset: int, memory: torch.Tensor) -> None:
        """Fill a uint8 tensor, aligned in memory and in length, from ``offset`` on.

        Raises:
            EnvironmentFault: the disk refuses.
        """
        self._transfer(os.preadv, "read", offset, memory)

    def write(self, offset: int, memory: torch.Tensor) -> None:
        """Write a uint8 tensor as :meth:`read` reads."""
        self._transfer(os.pwritev, "written", offset, memory)

    def _transfer(self, operation: object, verb: str, offset: int, memory: torch.Tensor) -> None:
        data, done = memory.numpy().data, 0
        while done < len(data):
            try:
                count = operation(self._direct, [data[done:]], offset + done)  # type: ignore[operator]  # a system call
                if count <= 0:
                    raise OSError(errno.EIO, f"{done} of {len(data)} bytes, then none")
            except OSError as error:
                raise EnvironmentFault(
                    f"offload.nvme_path {self.folder}: {self.what} could not be {verb} ({len(data)} bytes at {offset}):"
                    f" {error.strerror or error}. This update is incomplete and the state in memory is of no use; the "
                    "run's last checkpoint is whole: check the disk (dmesg), then start the run again to resume from it"
                ) from error
            done += count


@dataclass(frozen=True)
class StatePart:
    """Flat tensor of one kind of a bucket's state, this rank's share."""

    kind: StateKind
    numel: int

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype that the kind asks for, or fp32."""
        return self.kind.dtype or torch.float32

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in a file or a staging buffer."""
        return aligned(self.numel * self.dtype.itemsize)


class DiskState:
    """Files of one rank, one of each kind, and the place of each bucket in them.

    Args:
        parts: of each bucket, by its number.
    """

    def __init__(self, folder: Path, parts: Mapping[int, Sequence[StatePart]]) -> None:
        self._places: dict[tuple[int, StateKind], tuple[int, StatePart]] = {}
        ends: dict[StateKind, int] = {}
        for number, all_of_bucket in parts.items():
            for part in all_of_bucket:
                at = ends.get(part.kind, 0)
                self._places[number, part.kind] = at, part
                ends[part.kind] = at + part.nbytes
        self.files = {kind: StateFile(folder, max(end, ALIGN), kind.name) for kind, end in ends.items()}

    def mapped(self, number: int, kind: StateKind) -> torch.Tensor:
        """Return a bucket's state of a kind as a view of its file."""
        at, part = self._places[number, kind]
        return self.files[kind].mapped(at, part.numel, part.dtype)

    def read(self, number: int, memory: Mapping[StateKind, torch.Tensor]) -> None:
        """Read a bucket's state into uint8 tensors by kind."""
        for kind, into in memory.items():
            self.files[kind].read(self._places[number, kind][0], into)

    def write(self, number: int, memory: Mapping[StateKind, torch.Tensor]) -> None:
        """Write a bucket's state."""
        for kind, source in memory.items():
            self.files[kind].write(self._places[number, kind][0], source)

    def flush(self) -> None:
        """Write what views have changed to the files, and forget the pages."""
        for file in self.files.values():
            file.flush()
            file.forget_pages()

    def forget_pages(self) -> None:
        """Unmap the pages that views have touched."""
        for file in self.files.values():
            file.forget_pages()
