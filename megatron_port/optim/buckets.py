"""How a rank's parameters are laid out in flat buckets, and which part of them each replica owns. Pure arithmetic.

A bucket is what one collective moves. It holds parameters that are reduced alike: those with a gradient of their own,
those whose gradient is partial over tp, those that some tp ranks hold alike, and each tied parameter, whose layout must
be the same on the two stages that hold it. Buckets follow the order in which backward passes end: last chunk and last
layer first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_port.parallel.record import ParameterRecord

ALIGN = 64
"""Elements: every parameter starts at a multiple, so that vector loads of the kernels are aligned in every dtype."""


@dataclass(frozen=True)
class BucketEntry:
    """Place of a parameter in a bucket."""

    index: int
    """Index of the parameter in the engine's list."""
    start: int
    numel: int


@dataclass(frozen=True)
class BucketPlan:
    """One bucket: ``numel`` elements, padding included, a multiple of ``ALIGN`` times the number of shards."""

    slots: tuple[BucketEntry, ...]
    numel: int
    kind: str
    """plain | partial (gradients to be summed over tp) | shared (over the tp ranks that hold the same key/value heads)
    | tied (over the stages that hold a copy)"""


def _kind(record: ParameterRecord) -> str:
    if record.tied_key is not None:
        return "tied"
    if record.tp_copies > 1:
        return "shared"
    return "partial" if record.partial_grad_over_tp else "plain"


def plan_buckets(
    chunks: Sequence[Sequence[tuple[int, ParameterRecord, int]]], *, shards: int, capacity: int
) -> list[BucketPlan]:
    """Return buckets of at most ``capacity`` elements (a larger parameter has its own).

    Args:
        chunks: (index, record, elements of the local tensor) of the parameters of each chunk, in forward order.
        shards: replicas that share a bucket.
    """
    plans = []
    unit = ALIGN * shards
    for chunk in reversed(chunks):
        for kind in ("plain", "partial", "shared", "tied"):
            slots: list[BucketEntry] = []
            end = 0
            for index, record, numel in reversed(chunk):
                if _kind(record) != kind:
                    continue
                if slots and (end + numel > capacity or kind == "tied"):
                    plans.append(BucketPlan(tuple(slots), -(-end // unit) * unit, kind))
                    slots, end = [], 0
                slots.append(BucketEntry(index, end, numel))
                end += -(-numel // ALIGN) * ALIGN
            if slots:
                plans.append(BucketPlan(tuple(slots), -(-end // unit) * unit, kind))
    return plans


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
