"""Masters and optimizer state outside of the device's memory (ZeRO-Offload, Ren et al., arXiv 2101.06840; on a disk:
ZeRO-Infinity, Rajbhandari et al., arXiv 2104.07857).

The state of an offloaded bucket lives in host memory, page-locked where the device is a GPU, or in a file per rank and
kind (``memory.disk_state``). A step moves 4 bytes per parameter to the host, the gradient, and the updated weight back.
Both go through a ring of staging buffers (``memory.swap``), each large enough for all that one bucket's update
needs. The buckets whose weights the next forward pass needs first, the last to be reduced, are staged as soon as they
are reduced, as many as there are buffers; the others follow while the host updates those before them. No update begins
before the norm of all gradients is known, so the numbers are those of a run without offload.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_port.core.config.offload import OffloadConfig
from megatron_port.core.dist.device_streams import HOST, access, is_observed
from megatron_port.core.dist.host_memory import host_bytes
from megatron_port.core.optim.bucket_memory import StateLayout
from megatron_port.core.optim.buckets import BucketPlan
from megatron_port.core.optim.rules import StateKind
from megatron_port.ext.memory.disk_state import DiskState, StatePart, aligned
from megatron_port.ext.memory.swap import StagingBuffer, StagingRing

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
