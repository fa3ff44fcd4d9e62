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
from megatron_port.core.io.files import atomic_file, fsync_directory
from megatron_port.core.train.hooks import every
from megatron_port.ext.storage.copies import SLOTS, no_memory, own_folder

_PART = 1 << 24
"""Bytes that are written before it is looked whether they are still wanted."""


class DiskCopies:
    """The two copies of one rank's state on its node's disk. Not collective: ranks write at the same steps.

    Args:
        folder: ``copies_folder``'s for the disk; made here.
        interval: steps between copies.
        spare: the copy that is kept until there is another: what the run was resumed from, or the newest of those that
            are there. None: none of them.

    Raises:
        CheckpointError: the disk refuses the folders.
        EnvironmentFault: as ``own_folder``.
    """

    def __init__(self, folder: Path, *, rank: int, interval: int, spare: int | None = None) -> None:
        own_folder(folder, tier="disk")
        self._places = [(folder / name / shard_name(rank), folder / name / listing_name(rank)) for name in SLOTS]
        for slot, (_, listing) in enumerate(self._places):
            try:
                listing.parent.mkdir(mode=0o700, exist_ok=True)
                if slot != spare:
                    listing.unlink(missing_ok=True)
            except OSError as error:
                raise no_memory(listing, error, tier="disk") from error
        _sync_names(folder)
        self._interval, self._next, self._spare = interval, 0 if spare is None else 1 - spare, spare
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
        if self._next == self._spare:
            self._spare = None
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
        """Drop the copies of this start of step ``below`` and of later ones. The next one takes an empty place.

        Raises:
            CheckpointError: the disk keeps one, from which a later start would resume.
        """
        kept: tuple[Path, int, OSError] | None = None
        for listing, step in list(self._steps.items()):
            if step >= below:
                try:
                    listing.unlink(missing_ok=True)
                    del self._steps[listing]
                except OSError as error:
                    kept = listing, step, error
        if kept is not None:
            raise CheckpointError(
                f"{kept[0]}: the copy of step {kept[1]} counts no more, but the disk keeps it "
                f"({kept[2].strerror or kept[2]}), and the next start would resume from it; remove it, or set "
                "checkpoint.disk_interval = 0"
            ) from kept[2]
        held = [slot for slot, (_, listing) in enumerate(self._places) if listing in self._steps or slot == self._spare]
        if len(held) == 1:
            self._next = 1 - held[0]

    def close(self) -> None:
        """Have a copy that is not finished stay without a list; wait until memory is not read any more."""
        with self._naming:
            self._unwanted.set()
        if self._source is not None:
            self._read.wait()


def _sync_names(folder: Path) -> None:
    """Make a folder of copies, and those above it that are this package's, outlive a power cut."""
    for place in (folder, *folder.parents[:2]):
        try:
            fsync_directory(place)
        except PermissionError:  # another user's that may be entered and not read
            continue
        except OSError as error:
            raise no_memory(folder / SLOTS[0], error, tier="disk") from error


def file_system(path: Path) -> str:
    """Return the kind of the file system that a path is on, by the kernel's table; empty: it cannot be told."""
    try:
        device, table = os.stat(path).st_dev, Path("/proc/self/mountinfo").read_text(errors="replace")
    except OSError:
        return ""
    number = f"{os.major(device)}:{os.minor(device)}"
    rows = [line.partition(" - ") for line in table.splitlines()]
    return next((kind.split()[0] for mount, _, kind in rows if number in mount.split()[2:3] and kind), "")
