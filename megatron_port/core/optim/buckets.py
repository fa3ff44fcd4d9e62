"""Layout of a rank's parameters in flat buckets, and the part of them that each replica owns. Pure arithmetic.

A bucket is what one collective moves: parameters of one *unit* (embedding, layer, head), so that the weights of a unit
can be gathered, and its gradients reduced, without those of another. Each tied parameter, and each that several units
use, has a bucket of its own. Buckets follow the order in which backward passes end: last unit first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_port.core.dist.mesh import Factors, Mesh
from megatron_port.core.dist.record import ParameterRecord

ALIGN = 64
"""Elements: every parameter starts at a multiple, so that vector loads of the kernels are aligned in every dtype."""


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
                plans.append(_plan(
                    slots, end, number, factors, mesh, record.reduces_over(mesh) & first, split,
                    tied=record.tied_key,
                    late=record.tied_key is not None or slots[0].index in shared, align=align,
                ))
    return plans


def _plan(
    slots: tuple[BucketEntry, ...], end: int, unit: int, beyond: Mapping[int, Factors], mesh: Mesh, first: Factors,
    split: bool, *, tied: str | None, late: bool, align: int,
) -> BucketPlan:
    """Return the plan of a bucket of so many elements; ``beyond``: factors of further sums by parameter."""
    replicas = mesh.factors("dp_replicate")
    ranges: list[PartialRange] = []
    for slot in slots:
        factors, start = beyond[slot.index] - replicas, slot.start
        if ranges and ranges[-1].factors == factors:
            start = ranges.pop().start
        if factors:
            ranges.append(PartialRange(start, slot.start + slot.numel, factors))
    shards = mesh.size(first) if split else 1
    numel = -(-end // (align * shards)) * align * shards
    return BucketPlan(
        slots, numel, unit, first, shards, copies=beyond[slots[0].index] & replicas, partial=tuple(ranges), tied=tied,
        late=late,
    )


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
