"""Layout of a rank's parameters in flat buckets, and the part of them that each replica owns. Pure arithmetic.

A bucket is what one collective moves: parameters of one *unit* (embedding, layer, head), so that the weights of a unit
can be gathered, and its gradients reduced, without those of another. Each tied parameter, and each that several units
use, has a bucket of its own. Buckets follow the order in which backward passes end: last unit first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_port.core.dist.mesh import Factors, Mesh
from megatron_port.core.dist.record import ParameterRecord
from megatron_port.core.optim.rules import ALIGN


@dataclass(frozen=True)
class BucketEntry:
    """Position of a parameter in a bucket."""

    index: int
    """Index of the parameter in the engine's list."""
    start: int
    numel: int


@dataclass(frozen=True)
class PartialRange:
    """Elements [start, stop) of a bucket whose gradients are still to be summed along ``factors``: tp under sequence
    parallelism, the copies of key/value heads."""

    start: int
    stop: int
    factors: Factors


@dataclass(frozen=True)
class BucketPlan:
    """One bucket: ``numel`` elements, padding included, a multiple of the alignment times the number of shards."""

    slots: tuple[BucketEntry, ...]
    numel: int
    unit: int = 0
    """Index of the unit whose parameters it holds; of a shared parameter, the first that uses it."""
    first: Factors = frozenset()
    """Factors of the first sum of its gradients."""
    shards: int = 1
    """Replicas along them that divide it."""
    copies: Factors = frozenset()
    """Replicas of the shards, over which all of it is still to be summed after the first sums."""
    partial: tuple[PartialRange, ...] = ()
    """Parts that are to be summed along the model's axes as well."""
    tied: str | None = None
    """Key of the stages that hold a copy, over which it is also to be summed (``ParallelContext.tied_group``)."""
    late: bool = False
    """Its gradients come all through a backward pass, as those of a parameter that several units use, or it is a table,
    much larger than a layer's buckets: ZeRO stage 2 keeps a buffer for them."""
    frozen: bool = False
    """Nothing of it is trained: it has weights alone."""


BucketParameter = tuple[int, ParameterRecord, int]
"""A parameter: its index, its record, the elements of its local tensor."""


def plan_buckets(
    units: Sequence[Sequence[BucketParameter]], mesh: Mesh, *, first: Factors, split: bool, capacity: int,
    shared: Collection[int] = (), align: int = ALIGN,
) -> list[BucketPlan]:
    """Return buckets of at most ``capacity`` elements; a larger parameter has its own.

    Args:
        units: the parameters of each unit, in forward order, each parameter once.
        first: factors of the first sum, of those along which a parameter has copies: experts that ranks divide have
            fewer, and buckets of their own.
        split: this sum leaves each replica along them its part.
        shared: indices of parameters that several units use.
        align: every parameter starts, and every part of a bucket ends, at a multiple.
    """
    plans: list[BucketPlan] = []
    for number in reversed(range(len(units))):
        together: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[list[int], BucketParameter]]] = {}
        alone: list[tuple[list[int], BucketParameter]] = []
        for entry in reversed(units[number]):
            index, record, _ = entry
            summed = record.reduces_over(mesh)
            mine, beyond = summed & first, summed - first
            copies = beyond & mesh.factors("dp_replicate")
            if record.tied_key is not None or index in shared:
                alone.append((sorted(beyond), entry))
            else:
                key = tuple(sorted(copies)), tuple(sorted(mine))
                together.setdefault(key, []).append((sorted(beyond), entry))
        # What is partial lies together: at the end, in one range of each bucket for each set of factors.
        groups = [sorted(entries, key=lambda pair: pair[0]) for _, entries in sorted(together.items())]
        for entries in (*groups, *([one] for one in alone)):
            factors = {entry[0]: frozenset(beyond) for beyond, entry in entries}
            for slots, end in _filled([entry for _, entry in entries], capacity, align):
                _, record, _ = entries[0][1]
                summed = record.reduces_over(mesh) & first
                shards = mesh.size(summed) if split else 1
                copies, partial = _further_sums(slots, factors, mesh)
                plans.append(BucketPlan(
                    slots, -(-end // (align * shards)) * align * shards, number, summed, shards, copies=copies,
                    partial=partial, tied=record.tied_key,
                    late=record.tied_key is not None or slots[0].index in shared,
                ))
    return plans


def _further_sums(
    slots: Sequence[BucketEntry], beyond: Mapping[int, Factors], mesh: Mesh
) -> tuple[Factors, tuple[PartialRange, ...]]:
    """Return the replicas over which a bucket is summed after the first sums, and the parts of it that are summed along
    the model's axes; ``beyond``: factors of further sums by parameter."""
    replicas = mesh.factors("dp_replicate")
    ranges: list[PartialRange] = []
    for slot in slots:
        factors, start = beyond[slot.index] - replicas, slot.start
        if ranges and ranges[-1].factors == factors:
            start = ranges.pop().start
        if factors:
            ranges.append(PartialRange(start, slot.start + slot.numel, factors))
    return beyond[slots[0].index] & replicas, tuple(ranges)


def _filled(
    parameters: Sequence[BucketParameter], capacity: int, align: int
) -> Iterator[tuple[tuple[BucketEntry, ...], int]]:
    """The entries of one bucket after another, and the elements that they take."""
    slots: list[BucketEntry] = []
    end = 0
    for index, _, numel in parameters:
        if slots and end + numel > capacity:
            yield tuple(slots), end
            slots, end = [], 0
        slots.append(BucketEntry(index, end, numel))
        end += -(-numel // align) * align
    if slots:
        yield tuple(slots), end


@dataclass(frozen=True)
class ShardRange:
    """The part of a parameter that a shard holds: elements [start, start + numel) of its flattened local tensor,
    from ``at`` on in the bucket."""

    index: int
    start: int
    numel: int
    at: int


def shard_ranges(plan: BucketPlan, *, shard: int) -> list[ShardRange]:
    """Return the parameter ranges of shard ``shard`` of a bucket, in order."""
    size = plan.numel // plan.shards
    first, last = shard * size, (shard + 1) * size
    out = []
    for slot in plan.slots:
        low, high = max(slot.start, first), min(slot.start + slot.numel, last)
        if low < high:
            out.append(ShardRange(slot.index, low - slot.start, high - low, low))
    return out


# Memory for gradients that live only until they are reduced (ZeRO stage 2).

USUAL = 2
"""Buffers: in a backward pass one bucket fills up while the one before is being reduced."""


class GradBufferPool:
    """Flat buffers of ``size`` elements, lent to buckets while they fill up and are reduced."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.size, self.dtype, self.device = size, dtype, device
        self._free: list[torch.Tensor] = []
        self.made = 0
        """Buffers that exist."""

    def acquire(self, numel: int, free: Callable[[], bool]) -> torch.Tensor:
        """Return a buffer of ``numel`` elements, whatever they hold. With ``USUAL`` buffers lent out, ``free()`` is
        called until one has been released; if it returns false, one more is allocated."""
        while not self._free and self.made >= USUAL and free():
            pass
        if not self._free:
            self._free.append(torch.empty(self.size, dtype=self.dtype, device=self.device))
            self.made += 1
        return self._free.pop()[:numel]

    def release(self, buffer: torch.Tensor) -> None:
        """Return a buffer of :meth:`acquire` to the pool."""
        self._free.append(buffer.as_strided((self.size,), (1,), 0))

    def trim(self) -> None:
        """Free the buffers beyond ``USUAL`` that are not lent out."""
        while self._free and self.made > USUAL:
            self._free.pop()
            self.made -= 1


# Counting of the gradients added to each bucket, to find when it is full.

class GradReadyTracker:
    """Tracker of buckets that fill up together, in one round after another.

    Each use of a parameter adds to its gradient once. The first round counts the uses in one pass, so none of its
    buckets is full before it ends. From then on a bucket is full as soon as each of its parameters has received that
    count times the number of passes in the round. Buckets are reported as full in their given order only: the order is
    then the same on all replicas, whatever the order in which gradients arrive.

    Args:
        buckets: (number, its parameters' indices), in the order in which they are to be full.
        name: of a parameter, for messages.
    """

    def __init__(self, buckets: Sequence[tuple[int, Sequence[int]]], name: Callable[[int], str] = str) -> None:
        self.numbers = [number for number, _ in buckets]
        self._indices = [list(indices) for _, indices in buckets]
        self._place = {index: i for i, indices in enumerate(self._indices) for index in indices}
        self._name = name
        self._uses: dict[int, int] | None = None
        self._passes = 1
        self._early = False
        self._next = len(buckets)
        self._seen: dict[int, int] = dict.fromkeys(self._place, 0)
        self._missing: list[int] = []

    def begin(self, passes: int, *, early: bool) -> None:
        """Begin a round of so many passes. ``early``: buckets may be full before its end."""
        self._passes, self._next = passes, 0
        self._seen = dict.fromkeys(self._place, 0)
        self._early = early and self._uses is not None
        if self._uses is not None:
            self._missing = [sum(self._uses[i] > 0 for i in indices) for indices in self._indices]

    def added(self, index: int) -> list[int]:
        """Count a gradient added to a parameter; return the numbers of the buckets that are full now.

        Raises:
            RuntimeError: it comes after the bucket may have been full; it would be lost.
        """
        self._seen[index] += 1
        if not self._early:
            return []
        assert self._uses is not None
        seen, wanted = self._seen[index], self._uses[index] * self._passes
        if seen > wanted:
            raise RuntimeError(
                f"{self._name(index)}: gradient {seen} of this step, and the first step had {wanted}: its bucket may "
                "have been reduced already"
            )
        if seen < wanted:
            return []
        self._missing[self._place[index]] -= 1
        full = self._next
        while full < len(self.numbers) and self._missing[full] == 0:
            full += 1
        out, self._next = self.numbers[self._next : full], full
        return out

    def rest(self) -> list[int]:
        """End the round; return the numbers of the buckets that have not been full in it."""
        if self._uses is None:
            self._uses = {index: n // self._passes for index, n in self._seen.items()}
        out, self._next = self.numbers[self._next :], len(self.numbers)
        return out
