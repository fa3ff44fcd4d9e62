"""Flat buckets: every element once, the same layout for tied copies, shards that cover all and overlap nowhere."""

from __future__ import annotations

from typing import Any

from contexts import slice_record
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_port.optim.buckets import ALIGN, plan_buckets, shard_ranges
from megatron_port.parallel.record import SEQUENCE, InitSpec, ParameterRecord
from megatron_port.parallel.topology import Topology

MESH = Topology(tp=2, dp=4).mesh
kinds = st.sampled_from(["plain", "partial", "tied", "shared"])
parameters = st.lists(st.tuples(st.integers(1, 5000), kinds), min_size=1, max_size=12)


def record(i: int, numel: int, kind: str) -> ParameterRecord:
    extra: dict[str, dict[str, Any]] = {
        "plain": {}, "partial": {"partial_over": SEQUENCE}, "tied": {"tied_key": f"p{i}"}, "shared": {},
    }
    return slice_record(f"p{i}", (numel,), init=InitSpec("zeros"), decay=True, **extra[kind])


@given(st.lists(parameters, min_size=1, max_size=3), st.integers(1, 7), st.integers(1, 9000))
@settings(max_examples=150, deadline=None)
def test_shards_cover_every_element_once(units: list[list[tuple[int, str]]], shards: int, capacity: int) -> None:
    kind_of = [kind for unit in units for _, kind in unit]
    numbered, sizes = [], []
    for unit in units:
        numbered.append([(len(sizes) + i, record(len(sizes) + i, n, kind), n) for i, (n, kind) in enumerate(unit)])
        sizes += [n for n, _ in unit]
    plans = plan_buckets(
        numbered, MESH, first=MESH.factors("dp"), shards=shards, capacity=capacity,
        shared=[i for i, kind in enumerate(kind_of) if kind == "shared"],
    )
    seen = [[0] * n for n in sizes]
    for plan in plans:
        assert plan.numel % (ALIGN * shards) == 0 and not plan.copies
        assert len(plan.slots) == 1 or sum(s.numel for s in plan.slots) <= capacity + ALIGN * len(plan.slots)
        held = [kind_of[slot.index] for slot in plan.slots]
        assert plan.tied == ("tied" in held) and plan.late == bool({"tied", "shared"} & set(held))
        assert not plan.late or len(held) == 1
        # Of one unit, the partial ones in one range.
        assert {slot.index for slot in plan.slots} <= {i for i, _, _ in numbered[plan.unit]}
        ends = [(s.start, s.start + s.numel) for s, kind in zip(plan.slots, held) if kind == "partial"]
        wanted = [(ends[0][0], ends[-1][1], MESH.factors("tp"))] if ends else []
        assert [(part.start, part.stop, part.factors) for part in plan.partial] == wanted
        assert [kind == "partial" for kind in held] == sorted(kind == "partial" for kind in held)
        for slot in plan.slots:
            assert slot.start % ALIGN == 0
        for shard in range(shards):
            low, high = shard * plan.numel // shards, (shard + 1) * plan.numel // shards
            for f in shard_ranges(plan, shard=shard, shards=shards):
                assert low <= f.at and f.at + f.numel <= high
                for e in range(f.start, f.start + f.numel):
                    seen[f.index][e] += 1
    assert all(count == 1 for parameter in seen for count in parameter)
    assert [plan.unit for plan in plans] == sorted((plan.unit for plan in plans), reverse=True)  # as backward ends


def test_replicas_of_the_shards_are_summed_for_the_whole_bucket() -> None:
    mesh = Topology(tp=2, dp=4, shard=2).mesh
    unit = [(0, record(0, 500, "plain"), 500), (1, record(1, 70, "partial"), 70)]
    (plan,) = plan_buckets([unit], mesh, first=mesh.factors("dp_shard"), shards=2, capacity=9000)
    assert plan.copies == mesh.factors("dp_replicate")
    assert [(part.start, part.stop, part.factors) for part in plan.partial] == [(512, 582, mesh.factors("tp"))]
