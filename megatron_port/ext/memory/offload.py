"""Masters and optimizer state outside of the device's memory (ZeRO-Offload, Ren et al., arXiv 2101.06840; on a disk:
ZeRO-Infinity, Rajbhandari et al., arXiv 2104.07857).

The state of an offloaded bucket lives in host memory, page-locked where the device is a GPU, or in a file per rank and
kind (``memory.offload``). A step moves 4 bytes per parameter to the host, the gradient, and the updated weight back.
Both go through a ring of staging buffers (``memory.swap``), each large enough for all that one bucket's update
needs. The buckets whose weights the next forward pass needs first, the last to be reduced, are staged as soon as they
are reduced, as many as there are buffers; the others follow while the host updates those before them. No update begins
before the norm of all gradients is known, so the numbers are those of a run without offload.
"""

from __future__ import annotations

import errno
import mmap
import os
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_port.core.config.features import OffloadConfig
from megatron_port.core.dist.device_streams import HOST, access, is_observed
from megatron_port.core.errors import EnvironmentFault
from megatron_port.core.optim.buckets import BucketPlan, StateLayout
from megatron_port.core.optim.rules import StateKind
from megatron_port.ext.memory.host_memory import host_bytes
from megatron_port.ext.memory.swap import ALIGN, StagingBuffer, StagingRing

# Optimizer state on a disk: one file of fixed size per rank and kind, read and written by threads.
#
# The files are scratch. They are unlinked as soon as they are open, so that a process that dies, however, leaves
# nothing behind and nothing that could be taken for a checkpoint. All their blocks are allocated before training
# begins: a disk that is too small is an error at the start. Reads and writes bypass the page cache (``O_DIRECT``)
# where the file system takes that. What looks at the state between steps (checkpoints, hashes) does so through a
# mapping of the same file.

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


MASTER = StateKind("master")
WIDTH = 4
"""Bytes of an fp32 element."""


def offloaded_numbers(sizes: Sequence[int], fraction: float) -> list[int]:
    """Return the numbers of the buckets that are offloaded: the first ones, until they hold ``fraction`` of all
    elements (Twin-Flow). What is left for the device is what the next forward pass needs first."""
    wanted, held, out = fraction * sum(sizes), 0, []
    for number, size in enumerate(sizes):
        if held >= wanted:
            break
        out.append(number)
        held += size
    return out


@dataclass
class StagedBucket:
    """One bucket's update on its way: flat tensors in host memory, all of this rank's share."""

    bucket: Any
    buffer: StagingBuffer
    gradient: torch.Tensor
    weights: torch.Tensor
    """To be written by the update: in the buffer, or where the weights live on the host."""
    masters: torch.Tensor
    state: dict[StateKind, torch.Tensor]


class Offload:
    """The offloaded state of one rank.

    Args:
        plans: all buckets of the rank.
        layouts: of each bucket's optimizer state, beside the masters.
        weight: a parameter, whose dtype and device the weights have.

    Raises:
        EnvironmentFault: the disk is too small, or cannot be written.
    """

    def __init__(
        self, config: OffloadConfig, plans: Sequence[BucketPlan], *, layouts: Sequence[Sequence[StateLayout]],
        weight: torch.Tensor,
    ) -> None:
        self.config, self.device = config, weight.device
        sizes = [plan.numel // plan.shards for plan in plans]
        self.numbers = offloaded_numbers(sizes, config.fraction)
        self._sizes = {number: sizes[number] for number in self.numbers}
        self._state = {
            number: [StatePart(MASTER, sizes[number]), *(StatePart(s.kind, s.numel) for s in layouts[number])]
            for number in self.numbers
        }
        """Masters and state of each offloaded bucket."""
        self._weight_dtype = weight.dtype
        self.disk = DiskState(Path(config.nvme_path), self._state) if config.optimizer == "nvme" else None
        self.ring = StagingRing(
            self.device, count=max(1, min(config.buffers, len(self.numbers))),
            nbytes=max(map(self._room, self.numbers), default=0),
        )
        self.buckets: dict[int, Any] = {}
        """Offloaded buckets by number."""
        self.on_final: Callable[[Any], None] = lambda bucket: None
        """Called with a bucket (``optim.sharded.Bucket``) whose sums are final, before they are copied within the step.
        """
        self._number_of: dict[int, int] = {}
        self._staged: dict[int, StagedBucket] = {}

    @property
    def weights_on_host(self) -> bool:
        """Whether this rank's shards of the weights live in host memory."""
        return self.config.weights == "cpu"

    def host_zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros in host memory, page-locked where the device is a GPU."""
        return host_bytes(numel * dtype.itemsize, pinned=self.device.type == "cuda").view(dtype)

    def holds(self, number: int) -> bool:
        """Return whether the state of bucket ``number`` is offloaded."""
        return number in self._sizes

    def has(self, bucket: Any) -> bool:
        """Return whether the state of an attached bucket is offloaded."""
        return id(bucket) in self._number_of

    def allocate(self, number: int) -> tuple[torch.Tensor, dict[StateKind, torch.Tensor]]:
        """Return where the masters and the state, by kind, of an offloaded bucket live: zeros."""
        if self.disk is not None:
            found = {part.kind: self.disk.mapped(number, part.kind) for part in self._state[number]}
        else:
            found = {part.kind: self.host_zeros(part.numel, part.dtype) for part in self._state[number]}
        return found.pop(MASTER), found

    def attach(self, buckets: Sequence[Any]) -> None:
        """Take the buckets (``optim.sharded.Bucket``) of the plans."""
        self.buckets = {number: buckets[number] for number in self.numbers}
        self._number_of = {id(bucket): number for number, bucket in self.buckets.items()}

    # -- staging -----------------------------------------------------------------------------------------------------

    def _room(self, number: int) -> int:
        """Bytes of a buffer: the gradient, of state on a disk the masters and each kind, and the weights."""
        numel = self._sizes[number]
        weights = 0 if self.weights_on_host else aligned(self._weight_dtype.itemsize * numel)
        state = 0 if self.disk is None else sum(part.nbytes for part in self._state[number])
        return aligned(WIDTH * numel) + state + weights

    def _home(self, bucket: Any) -> list[torch.Tensor]:
        return [bucket.masters, *bucket.state.values()]

    def reduced(self, bucket: Any) -> None:
        """Stage a bucket whose gradients are final, if its turn in the update comes within the ring's buffers."""
        number = self._number_of.get(id(bucket))
        if number is not None and number in self.numbers[-self.ring.count :] and number not in self._staged:
            self.on_final(bucket)
            self._stage(number)

    def _stage(self, number: int) -> None:
        """Start to copy a bucket's gradient to the host, and to read its state from the disk."""
        bucket, numel = self.buckets[number], self._sizes[number]
        buffer = self.ring.acquire()
        gradient = buffer.view(torch.float32, numel)
        masters, state, weights = bucket.masters, dict(bucket.state), bucket.shard
        if not self.weights_on_host:
            end = self._room(number) - aligned(self._weight_dtype.itemsize * numel)
            weights = buffer.view(self._weight_dtype, numel, offset=end)
        if self.disk is not None:
            disk, memory = self.disk, self._bytes(number, buffer)
            views = {p.kind: memory[p.kind][: p.numel * p.dtype.itemsize].view(p.dtype) for p in self._state[number]}
            masters, state = views.pop(MASTER), views
            self.ring.start_io(
                buffer, "state is read from its files", lambda: disk.read(number, memory), reads=self._home(bucket),
                writes=list(memory.values()),
            )
        self.ring.copy_out(bucket.sums, gradient, buffer)
        self._staged[number] = StagedBucket(bucket, buffer, gradient, weights, masters, state)

    def _bytes(self, number: int, buffer: StagingBuffer) -> dict[StateKind, torch.Tensor]:
        """The parts of a buffer that go to the disk and come from there, as bytes by kind, padding included."""
        out, at = {}, aligned(WIDTH * self._sizes[number])
        for part in self._state[number]:
            out[part.kind] = buffer.memory[at : at + part.nbytes]
            at += part.nbytes
        return out

    def updates(self) -> Iterator[StagedBucket]:
        """Yield each bucket when its gradient and state are there for the host to update, in the order in which the
        next forward pass needs the weights; what has been updated then goes back."""
        waiting = deque(reversed(self.numbers))
        while waiting:
            for number in list(waiting)[: self.ring.count]:
                if number not in self._staged and self.ring.free:
                    self._stage(number)
            number = waiting.popleft()
            staged = self._staged.pop(number)
            self.ring.wait_io(staged.buffer)
            self.ring.wait_host(staged.buffer)
            self._note_update(staged)
            yield staged
            self._return(number, staged)

    def _note_update(self, staged: StagedBucket) -> None:
        if is_observed():
            updated = [staged.masters, *staged.state.values(), staged.weights]
            access(HOST, "update", reads=[staged.gradient], writes=updated)

    def _return(self, number: int, staged: StagedBucket) -> None:
        """Start to copy the weights to the device and to write the state to the disk; give the buffer up."""
        buffer, bucket = staged.buffer, staged.bucket
        if not self.weights_on_host:
            self.ring.copy_in(staged.weights, bucket.shard, buffer)
            self.ring.wait_target(buffer)
        if self.disk is not None:
            disk, memory = self.disk, self._bytes(number, buffer)
            self.ring.start_io(
                buffer, "state is written to its files", lambda: disk.write(number, memory),
                reads=list(memory.values()), writes=self._home(bucket),
            )
        self.ring.release(buffer)

    def discard(self) -> None:
        """Give up what is staged: the step is skipped."""
        for staged in self._staged.values():
            self.ring.wait_io(staged.buffer)
            self.ring.release(staged.buffer)
        self._staged.clear()

    # -- the state between steps -------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until all state is where it lives, so that it may be read there."""
        self.ring.drain()
        if self.disk is not None:
            self.disk.forget_pages()
        if is_observed():
            access(HOST, "the state is read", reads=[t for b in self.buckets.values() for t in self._home(b)])

    def changed(self) -> None:
        """Take note that the state has been set from outside."""
        if self.disk is not None:
            self.disk.flush()
