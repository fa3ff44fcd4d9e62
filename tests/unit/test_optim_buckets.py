"""Flat buckets: every element once, the same layout for tied copies, shards that cover all and overlap nowhere."""

from __future__ import annotations

from typing import Any

from contexts import rank_of, slice_record
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_port.core.dist.mesh import Topology
from megatron_port.core.dist.record import SEQUENCE, InitSpec, ParameterRecord, Shard, make_record
from megatron_port.core.optim.buckets import plan_buckets, shard_ranges
from megatron_port.core.optim.rules import ALIGN

kinds = st.sampled_from(["plain", "partial", "tied", "shared"])
parameters = st.lists(st.tuples(st.integers(1, 5000), kinds), min_size=1, max_size=12)


def record(i: int, numel: int, kind: str) -> ParameterRecord:
    extra: dict[str, dict[str, Any]] = {
        "plain": {}, "partial": {"partial_over": SEQUENCE}, "tied": {"tied_key": f"p{i}"}, "shared": {},
    }
    return slice_record(f"p{i}", (numel,), init=InitSpec("zeros"), decay=True, **extra[kind])


@given(st.lists(parameters, min_size=1, max_size=3), st.sampled_from([1, 2, 3, 4, 7]), st.integers(1, 9000))
@settings(max_examples=150, deadline=None)
def test_shards_cover_every_element_once(units: list[list[tuple[int, str]]], dp: int, capacity: int) -> None:
    mesh, split = Topology(tp=2, dp=dp).mesh, dp != 4
    shards = dp if split else 1
    kind_of = [kind for unit in units for _, kind in unit]
    numbered, sizes = [], []
    for unit in units:
        numbered.append([(len(sizes) + i, record(len(sizes) + i, n, kind), n) for i, (n, kind) in enumerate(unit)])
        sizes += [n for n, _ in unit]
    plans = plan_buckets(
        numbered, mesh, reduce_dims=mesh.dims("dp"), split=split, capacity=capacity,
        shared=[i for i, kind in enumerate(kind_of) if kind == "shared"],
    )
    seen = [[0] * n for n in sizes]
    for plan in plans:
        assert plan.numel % (ALIGN * shards) == 0 and not plan.copies and plan.shards == shards
        assert len(plan.slots) == 1 or sum(s.numel for s in plan.slots) <= capacity + ALIGN * len(plan.slots)
        held = [kind_of[slot.index] for slot in plan.slots]
        assert (plan.tied is not None) == ("tied" in held)
        assert plan.dedicated_buffer == bool({"tied", "shared"} & set(held))
        assert not plan.dedicated_buffer or len(held) == 1
        # Of one unit, the partial ones in one range.
        assert {slot.index for slot in plan.slots} <= {i for i, _, _ in numbered[plan.unit]}
        ends = [(s.start, s.start + s.numel) for s, kind in zip(plan.slots, held) if kind == "partial"]
        wanted = [(ends[0][0], ends[-1][1], mesh.dims("tp"))] if ends else []
        assert [(part.start, part.stop, part.dims) for part in plan.partial] == wanted
        assert [kind == "partial" for kind in held] == sorted(kind == "partial" for kind in held)
        for slot in plan.slots:
            assert slot.start % ALIGN == 0
        for shard in range(shards):
            low, high = shard * plan.numel // shards, (shard + 1) * plan.numel // shards
            for f in shard_ranges(plan, shard=shard):
                assert low <= f.at and f.at + f.numel <= high
                for e in range(f.start, f.start + f.numel):
                    seen[f.index][e] += 1
    assert all(count == 1 for parameter in seen for count in parameter)
    assert [plan.unit for plan in plans] == sorted((plan.unit for plan in plans), reverse=True)  # as backward ends


def test_replicas_of_the_shards_are_summed_for_the_whole_bucket() -> None:
    mesh = Topology(tp=2, dp=4, shard=2).mesh
    unit = [(0, record(0, 500, "plain"), 500), (1, record(1, 70, "partial"), 70)]
    (plan,) = plan_buckets([unit], mesh, reduce_dims=mesh.dims("dp_shard"), split=True, capacity=9000)
    assert plan.copies == mesh.dims("dp_replicate")
    assert [(part.start, part.stop, part.dims) for part in plan.partial] == [(512, 582, mesh.dims("tp"))]


def test_experts_that_ranks_divide_are_split_over_their_copies_alone() -> None:
    """Beside dense parameters they have buckets of their own: their copies are what ep leaves of the replicas, and of
    tp, along which each rank has its own tokens."""
    mesh = Topology(tp=2, dp=4, ep=4).mesh
    one = make_record(
        "e", (8, 100), rank_of(Topology(), 0), init=InitSpec("zeros"), decay=True, shards=(Shard(0, ("ep",)),),
        partial_over=SEQUENCE,
    )
    unit = [(0, record(0, 500, "plain"), 500), (1, one, 200)]
    dense, experts = sorted(
        plan_buckets([unit], mesh, reduce_dims=mesh.dims("dp"), split=True, capacity=9000),
        key=lambda p: p.slots[0].index,
    )
    assert (dense.shards, experts.shards) == (4, 2) and experts.reduce_dims == mesh.dims("edp") < dense.reduce_dims
    assert not dense.partial and not experts.partial
    smaller = Topology(tp=4, dp=2, ep=2).mesh  # two tp ranks hold the same experts, and different tokens
    (plan,) = plan_buckets([unit[1:]], smaller, reduce_dims=smaller.dims("dp"), split=True, capacity=9000)
    assert plan.reduce_dims == smaller.dims("dp") and [part.dims for part in plan.partial] == [
        smaller.dims("expert_tp")
    ]
