"""Flat buckets: every element once, the same layout for tied copies, shards that cover all and overlap nowhere."""

from __future__ import annotations

from typing import Any

from contexts import slice_record
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_port.optim.buckets import ALIGN, plan_buckets, shard_ranges
from megatron_port.parallel.mesh import REPLICAS
from megatron_port.parallel.record import SEQUENCE, InitSpec, ParameterRecord
from megatron_port.parallel.topology import Topology

MESH = Topology(tp=2, dp=4).mesh
kinds = st.sampled_from(["plain", "partial", "tied"])
parameters = st.lists(st.tuples(st.integers(1, 5000), kinds), min_size=1, max_size=12)


def record(i: int, numel: int, kind: str) -> ParameterRecord:
    extra: dict[str, Any] = {"plain": {}, "partial": {"partial_over": SEQUENCE}, "tied": {"tied_key": f"p{i}"}}
    return slice_record(f"p{i}", (numel,), init=InitSpec("zeros"), decay=True, **extra[kind])


@given(st.lists(parameters, min_size=1, max_size=3), st.integers(1, 7), st.integers(1, 9000))
@settings(max_examples=150, deadline=None)
def test_shards_cover_every_element_once(
    chunks: list[list[tuple[int, str]]], shards: int, capacity: int
) -> None:
    numbered, sizes = [], []
    for chunk in chunks:
        numbered.append([(len(sizes) + i, record(len(sizes) + i, n, kind), n) for i, (n, kind) in enumerate(chunk)])
        sizes += [n for n, _ in chunk]
    records = {i: r for chunk in numbered for i, r, _ in chunk}
    plans = plan_buckets(numbered, MESH, first=MESH.factors("dp"), shards=shards, capacity=capacity)
    seen = [[0] * n for n in sizes]
    for plan in plans:
        assert plan.numel % (ALIGN * shards) == 0
        assert len(plan.slots) == 1 or sum(s.numel for s in plan.slots) <= capacity + ALIGN * len(plan.slots)
        for slot in plan.slots:
            assert slot.start % ALIGN == 0
            owner = records[slot.index]
            assert plan.tied == (owner.tied_key is not None) and (not plan.tied or len(plan.slots) == 1)
            assert plan.beyond == (MESH.factors("tp") if owner.partial_over == SEQUENCE else frozenset())
        for shard in range(shards):
            low, high = shard * plan.numel // shards, (shard + 1) * plan.numel // shards
            for f in shard_ranges(plan, shard=shard, shards=shards):
                assert low <= f.at and f.at + f.numel <= high
                for e in range(f.start, f.start + f.numel):
                    seen[f.index][e] += 1
    assert all(count == 1 for parameter in seen for count in parameter)
    # Last chunk first: its backward passes end first.
    order = [next(c for c, chunk in enumerate(numbered) if plan.slots[0].index in {i for i, _, _ in chunk})
             for plan in plans]
    assert order == sorted(order, reverse=True)


def test_gradients_of_shared_heads_are_reduced_by_themselves() -> None:
    """One key/value head for three ranks: summed over the same ranks as a norm's, in a bucket of its own.

    A ring of three rounds an element by its place in the buffer, so that a norm's size would change a head's gradient.
    """
    mesh = Topology(tp=3, kv_copies=3).mesh
    heads = slice_record("qkv", (60,), init=InitSpec("zeros"), decay=True, partial_over=(*REPLICAS, "kv_copies"))
    norm = slice_record("norm", (7,), init=InitSpec("zeros"), decay=True, partial_over=SEQUENCE)
    assert heads.reduces_over(mesh) == norm.reduces_over(mesh) == mesh.factors("tp")
    parameters = [(0, norm, 7), (1, heads, 60), (2, norm, 7)]
    plans = plan_buckets([parameters], mesh, first=mesh.factors(*REPLICAS), shards=1, capacity=9000)
    assert [[slot.index for slot in plan.slots] for plan in plans] == [[2, 0], [1]]
    assert all(plan.beyond == mesh.factors("tp") for plan in plans)


def test_heads_that_nobody_shares_lie_with_the_others() -> None:
    mesh = Topology(tp=2).mesh
    heads = slice_record("qkv", (60,), init=InitSpec("zeros"), decay=True, partial_over=(*REPLICAS, "kv_copies"))
    weight = slice_record("up", (7,), init=InitSpec("zeros"), decay=True)
    plans = plan_buckets(
        [[(0, weight, 7), (1, heads, 60)]], mesh, first=mesh.factors(*REPLICAS), shards=1, capacity=9000
    )
    assert [[slot.index for slot in plan.slots] for plan in plans] == [[1, 0]]
