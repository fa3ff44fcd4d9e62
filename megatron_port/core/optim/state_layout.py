"""Where the optimizer's state of a bucket lies: one flat tensor for each kind, and the range of each parameter in it.

State of elements and blocks follows the bucket: where all parameters have a kind, it lies as the masters do. Where only
some have it, theirs alone takes memory. State of rows and columns is small, and every rank of a bucket holds it for all
of the bucket's parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from megatron_port.core.dist.record import ParameterRecord
from megatron_port.core.optim.buckets import ALIGN, BucketPlan, ShardRange, shard_ranges
from megatron_port.core.optim.rules import OptimizerRule, StateKind


@dataclass(frozen=True)
class StateRange:
    """Elements [start, start + numel) of the flattened state of parameter ``index``, from ``at`` on in the flat tensor.

    ``start`` counts in this rank's tensor of the state (``StateKind.place``).
    """

    index: int
    start: int
    numel: int
    at: int

    @property
    def span(self) -> slice:
        """Place in the flat tensor."""
        return slice(self.at, self.at + self.numel)


@dataclass(frozen=True)
class StateLayout:
    """Flat tensor of one kind: ``numel`` elements, and the ranges in it, in the order of the bucket."""

    kind: StateKind
    numel: int
    ranges: tuple[StateRange, ...]


def state_layouts(
    plan: BucketPlan, shard: int, records: Sequence[ParameterRecord], rule: OptimizerRule
) -> list[StateLayout]:
    """Return the layouts of all kinds that parameters of a bucket have, on the rank that holds ``shard`` of it.

    Raises:
        ConfigError: a rank's slice of a parameter would cut a block (``StateKind.place``).
    """
    kinds = {slot.index: rule.state(records[slot.index]) for slot in plan.slots}
    owned = shard_ranges(plan, shard=shard)
    out = []
    for kind in dict.fromkeys(kind for each in kinds.values() for kind in each):
        for slot in plan.slots:
            if kind in kinds[slot.index]:
                kind.place(records[slot.index])  # refuses what it cannot hold, alike on every shard
        if kind.divided:
            having = [f for f in owned if kind in kinds[f.index]]
            everywhere = all(kind in each for each in kinds.values())
            out.append(_aligned(plan, shard, kind, having) if everywhere else _packed(kind, having))
        else:
            having_all = [slot.index for slot in plan.slots if kind in kinds[slot.index]]
            out.append(_whole(kind, having_all, records))
    return out


def _aligned(plan: BucketPlan, shard: int, kind: StateKind, owned: Sequence[ShardRange]) -> StateLayout:
    """The layout of the masters, padding included."""
    size, b = plan.numel // plan.shards, kind.block
    ranges = [StateRange(f.index, f.start // b, -(-f.numel // b), (f.at - shard * size) // b) for f in owned]
    return StateLayout(kind, size // b, tuple(ranges))


def _packed(kind: StateKind, owned: Sequence[ShardRange]) -> StateLayout:
    ranges, end = [], 0
    for f in owned:
        numel = -(-f.numel // kind.block)
        ranges.append(StateRange(f.index, f.start // kind.block, numel, end))
        end += -(-numel // ALIGN) * ALIGN
    return StateLayout(kind, end, tuple(ranges))


def _whole(kind: StateKind, indices: Sequence[int], records: Sequence[ParameterRecord]) -> StateLayout:
    ranges, end = [], 0
    for index in indices:
        numel = prod(kind.place(records[index]).local_shape)
        ranges.append(StateRange(index, 0, numel, end))
        end += -(-numel // ALIGN) * ALIGN
    return StateLayout(kind, end, tuple(ranges))
