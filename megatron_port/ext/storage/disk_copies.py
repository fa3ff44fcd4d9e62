"""Copies of the training state on a node's disk: where to resume from if those in the nodes' memory are gone.

Every ``checkpoint.disk_interval`` steps, and at the first copy of a start, each rank's file and list are written from
memory (``storage.copies``) to a folder of the node's disk while training continues. They outlive what takes the memory:
a reboot, a power cut, a scheduler that empties ``/dev/shm`` between jobs. They help a start on the same nodes.

There are two, written in turn. A copy is begun once all ranks have the one before it on their disks; so wherever a
fault strikes, all have the newer one or all have the older. The file is synced before its list is written.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path

from megatron_port.core.checkpoint.format import shard_name
from megatron_port.core.checkpoint.writer import listing_name
from megatron_port.core.errors import CheckpointError
from megatron_port.core.io.files import atomic_file
from megatron_port.core.train.hooks import every
from megatron_port.ext.storage.copies import SLOTS, no_memory, own_folder

_PART = 1 << 24
"""Bytes that are written before it is looked whether they are still wanted."""


class DiskCopies:
    """The two copies of one rank's state on its node's disk. Not collective: ranks write at the same steps.

    Args:
        folder: ``copies_folder``'s for the disk; made here.
        interval: steps between copies.
        spare: the copy that the run was resumed from: it is kept until there is another. None: none of them.
    """

    def __init__(self, folder: Path, *, rank: int, interval: int, spare: int | None = None) -> None:
        own_folder(folder, tier="disk")
        self._places = [(folder / name / shard_name(rank), folder / name / listing_name(rank)) for name in SLOTS]
        for slot, (_, listing) in enumerate(self._places):
            listing.parent.mkdir(mode=0o700, exist_ok=True)
            if slot != spare:
                listing.unlink(missing_ok=True)
        self._interval, self._next = interval, 0 if spare is None else 1 - spare
        self._steps: dict[Path, int] = {}
        """Steps of the copies of this start, by list."""
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self._source: Path | None = None
        """File in memory that is read."""
        self._read, self._unwanted, self._naming = threading.Event(), threading.Event(), threading.Lock()

    def due(self, step: int) -> bool:
        """Return whether the copy of ``step`` is to be on the disk: by the interval, or as the first of this start."""
        return not self._steps or every(self._interval, step)

    def begin(self, step: int, file: Path, listing: Path) -> None:
        """Write a copy that is in memory over the older of the two, while this returns; nothing if it is not due.

        Before, all ranks have the newer one (``finish``, ``keep``).
        """
        if not self.due(step):
            return
        target, target_list = self._places[self._next]
        self._steps[target_list], self._source = step, file
        self._read.clear()

        def run() -> None:
            try:
                self._write(file, listing.read_bytes(), target, target_list)
            except OSError as error:
                self._error = no_memory(target, error, tier="disk")
            finally:
                self._read.set()

        self._thread = threading.Thread(target=run, name="copies on disk", daemon=True)
        self._thread.start()

    def _write(self, file: Path, text: bytes, target: Path, listing: Path) -> None:
        listing.unlink(missing_ok=True)
        if json.loads(text.partition(b"\n")[2])["file"]:
            with open(file, "rb", buffering=0) as source, open(target, "wb", buffering=0) as stream:
                size = os.fstat(source.fileno()).st_size
                at = 0
                while at < size and not self._unwanted.is_set():
                    sent = os.sendfile(stream.fileno(), source.fileno(), at, min(_PART, size - at))
                    if not sent:
                        raise OSError(errno.EIO, f"{file} has become shorter")
                    at += sent
                self._read.set()
                if at < size:
                    return
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # the memory is wanted for other things
        with self._naming:
            if not self._unwanted.is_set():
                with atomic_file(listing, parents=False) as stream:
                    stream.write(text)

    def leave(self, file: Path) -> None:
        """Wait until a file in memory is not read any more."""
        if file == self._source:
            self._read.wait()

    def finish(self) -> CheckpointError | None:
        """Wait until the last copy is on this node's disk. Return what the disk refused."""
        if self._thread is not None:
            self._thread.join()
        self._thread, error, self._error = None, self._error, None
        return error

    def keep(self) -> None:
        """Take note that all ranks have the last copy: the next one takes the place of the one before it."""
        if self._steps:
            self._next = 1 - self._next

    def forget(self, below: int = 0) -> None:
        """Drop the copies of this start of step ``below`` and of later ones."""
        for listing, step in list(self._steps.items()):
            if step >= below:
                listing.unlink(missing_ok=True)
                del self._steps[listing]

    def close(self) -> None:
        """Have a copy that is not finished stay without a list; wait until memory is not read any more."""
        with self._naming:
            self._unwanted.set()
        if self._source is not None:
            self._read.wait()
