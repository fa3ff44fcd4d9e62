"""Masters and optimizer state outside of the device's memory (ZeRO-Offload, Ren et al., arXiv 2101.06840; on a disk:
ZeRO-Infinity, Rajbhandari et al., arXiv 2104.07857).

The state of an offloaded bucket lives in host memory, page-locked where the device is a GPU, or in a file per rank and
kind (``optim.disk_state``). A step moves 4 bytes per parameter to the host, the gradient, and the updated weight back.
Both go through a ring of staging buffers (``parallel.staging``), each large enough for all that one bucket's update
needs. The buckets whose weights the next forward pass needs first, the last to be reduced, are staged as soon as they
are reduced, as many as there are buffers; the others follow while the host updates those before them. No update begins
before the norm of all gradients is known, so the numbers are those of a run without offload.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_port.config.offload import OffloadConfig
from megatron_port.optim.buckets import BucketPlan
from megatron_port.optim.disk_state import DiskState, aligned
from megatron_port.parallel.device_streams import HOST, access, is_observed
from megatron_port.parallel.staging import StagingBuffer, StagingRing
from megatron_port.runtime.pinned import host_bytes

MASTER = "master"
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
    state: dict[str, torch.Tensor]


class Offload:
    """The offloaded state of one rank.

    Args:
        plans: all buckets of the rank.
        kinds: of the optimizer's state, beside the masters.
        weight: a parameter, whose dtype and device the weights have.

    Raises:
        EnvironmentFault: the disk is too small, or cannot be written.
    """

    def __init__(
        self, config: OffloadConfig, plans: Sequence[BucketPlan], *, kinds: Sequence[str], weight: torch.Tensor,
    ) -> None:
        self.config, self.device = config, weight.device
        self.kinds = tuple(kinds)
        sizes = [plan.numel // plan.shards for plan in plans]
        self.numbers = offloaded_numbers(sizes, config.fraction)
        self._sizes = {number: sizes[number] for number in self.numbers}
        self._weight_dtype = weight.dtype
        self.disk: DiskState | None = None
        if config.optimizer == "nvme":
            self.disk = DiskState(Path(config.nvme_path), self._sizes, [MASTER, *self.kinds])
        largest = max(self._sizes.values(), default=0)
        self.ring = StagingRing(
            self.device, count=max(1, min(config.buffers, len(self.numbers))), nbytes=self._room(largest)
        )
        self.buckets: dict[int, Any] = {}
        """Offloaded buckets by number."""
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

    def allocate(self, number: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return where the masters and the state, by kind, of an offloaded bucket live: zeros, fp32."""
        if self.disk is not None:
            return self.disk.mapped(number, MASTER), {kind: self.disk.mapped(number, kind) for kind in self.kinds}
        size = self._sizes[number]
        state = {kind: self.host_zeros(size, torch.float32) for kind in self.kinds}
        return self.host_zeros(size, torch.float32), state

    def attach(self, buckets: Sequence[Any]) -> None:
        """Take the buckets (``optim.sharded.Bucket``) of the plans."""
        self.buckets = {number: buckets[number] for number in self.numbers}
        self._number_of = {id(bucket): number for number, bucket in self.buckets.items()}

    # -- staging -----------------------------------------------------------------------------------------------------

    def _parts(self) -> int:
        """fp32 parts of a buffer: the gradient, and of state on a disk the masters and each kind."""
        return 1 if self.disk is None else 2 + len(self.kinds)

    def _room(self, numel: int) -> int:
        weights = 0 if self.weights_on_host else aligned(self._weight_dtype.itemsize * numel)
        return self._parts() * aligned(WIDTH * numel) + weights

    def _home(self, bucket: Any) -> list[torch.Tensor]:
        return [bucket.masters, *bucket.state.values()]

    def reduced(self, bucket: Any) -> None:
        """Stage a bucket whose gradients are final, if its turn in the update comes within the ring's buffers."""
        number = self._number_of.get(id(bucket))
        if number is not None and number in self.numbers[-self.ring.count :] and number not in self._staged:
            self._stage(number)

    def _stage(self, number: int) -> None:
        """Start to copy a bucket's gradient to the host, and to read its state from the disk."""
        bucket, numel = self.buckets[number], self._sizes[number]
        buffer = self.ring.take()
        part = aligned(WIDTH * numel)
        views = [buffer.view(torch.float32, numel, offset=i * part) for i in range(self._parts())]
        weights = bucket.shard
        if not self.weights_on_host:
            weights = buffer.view(self._weight_dtype, numel, offset=len(views) * part)
        masters, state = bucket.masters, {kind.name: flat for kind, flat in bucket.state.items()}
        if self.disk is not None:
            masters, state = views[1], dict(zip(self.kinds, views[2:]))
            disk, memory = self.disk, self._bytes(buffer, part)
            self.ring.start_io(
                buffer, "state is read from its files", lambda: disk.read(number, memory), reads=self._home(bucket),
                writes=list(memory.values()),
            )
        self.ring.copy_out(bucket.sums, views[0], buffer)
        self._staged[number] = StagedBucket(bucket, buffer, views[0], weights, masters, state)

    def _bytes(self, buffer: StagingBuffer, part: int) -> dict[str, torch.Tensor]:
        """The parts of a buffer that go to the disk and come from there, as bytes by kind, padding included."""
        kinds = (MASTER, *self.kinds)
        return {kind: buffer.memory[i * part : (i + 1) * part] for i, kind in enumerate(kinds, 1)}

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
            disk, memory = self.disk, self._bytes(buffer, aligned(WIDTH * self._sizes[number]))
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
