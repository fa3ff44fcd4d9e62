"""Layout of a rank's parameters in flat buckets, and the part of them that each replica owns. Pure arithmetic.

A bucket is what one collective moves. It holds parameters whose gradients are summed over the same ranks, those of
shared key/value heads apart (``ParameterRecord.sums_query_heads``); each tied parameter has its own, because its layout
must be the same on the two stages that hold it. Buckets follow the order in which backward passes end: last chunk and
last layer first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_port.parallel.mesh import REPLICAS, Factors, Mesh
from megatron_port.parallel.record import ParameterRecord

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
class BucketPlan:
    """One bucket: ``numel`` elements, padding included, a multiple of ``ALIGN`` times the number of shards."""

    slots: tuple[BucketEntry, ...]
    numel: int
    beyond: Factors = frozenset()
    """Factors along which the first sums are still to be summed: tp under sequence parallelism, the copies of
    key/value heads, replicas of the shards."""
    tied: bool = False
    """Also to be summed over the stages that hold a copy."""
    late: bool = False
    """Its gradients come all through a backward pass: those of norms, biases and tied tables."""


Listed = tuple[int, ParameterRecord, int]
"""A parameter: its index, its record, the elements of its local tensor."""


def plan_buckets(
    chunks: Sequence[Sequence[Listed]], mesh: Mesh, *, first: Factors, shards: int, capacity: int
) -> list[BucketPlan]:
    """Return buckets of at most ``capacity`` elements; a larger parameter has its own.

    Args:
        chunks: the parameters of each chunk, in forward order.
        first: factors of the first sum, which leaves each of ``shards`` replicas its part.
        shards: replicas that divide a bucket.
    """
    def key(record: ParameterRecord) -> tuple[bool, bool, tuple[int, ...]]:
        beyond = tuple(sorted(record.reduces_over(mesh) - first))
        return record.tied_key is not None, record.sums_query_heads(mesh), beyond

    plans: list[BucketPlan] = []
    for chunk in reversed(chunks):
        for kind in sorted({key(record) for _, record, _ in chunk}):
            tied, _, beyond = kind
            alike = [entry for entry in reversed(chunk) if key(entry[1]) == kind]
            for slots, end in _filled(alike, 0 if tied else capacity):
                numel = -(-end // (ALIGN * shards)) * ALIGN * shards
                late = tied or bool(frozenset(beyond) - mesh.factors(*REPLICAS))
                plans.append(BucketPlan(slots, numel, frozenset(beyond), tied, late))
    return plans


def _filled(parameters: Sequence[Listed], capacity: int) -> Iterator[tuple[tuple[BucketEntry, ...], int]]:
    """The entries of one bucket after another, and the elements that they take."""
    slots: list[BucketEntry] = []
    end = 0
    for index, _, numel in parameters:
        if slots and end + numel > capacity:
            yield tuple(slots), end
            slots, end = [], 0
        slots.append(BucketEntry(index, end, numel))
        end += -(-numel // ALIGN) * ALIGN
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


def shard_ranges(plan: BucketPlan, *, shard: int, shards: int) -> list[ShardRange]:
    """Return the parameter ranges of shard ``shard`` of a bucket's ``shards``, in order."""
    size = plan.numel // shards
    first, last = shard * size, (shard + 1) * size
    out = []
    for slot in plan.slots:
        low, high = max(slot.start, first), min(slot.start + slot.numel, last)
        if low < high:
            out.append(ShardRange(slot.index, low - slot.start, high - low, low))
    return out
