"""Rank arithmetic: a bijection, groups that partition the world, and DeepSpeed's numbering."""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_port.core.dist.groups import ParallelContext, planned
from megatron_port.core.dist.mesh import Coordinates, Topology
from megatron_port.core.errors import ConfigError, EnvironmentFault

AXES = ("tp", "pp", "dp")
TOPOLOGIES = st.builds(Topology, tp=st.integers(1, 9), pp=st.integers(1, 9), dp=st.integers(1, 9))


def groups_along(t: Topology, axis: str) -> list[tuple[int, ...]]:
    return list(t.mesh.groups(t.mesh.dims(axis)))


@settings(max_examples=80, deadline=None)
@given(TOPOLOGIES)
def test_ranks_and_coordinates_are_one_to_one(t: Topology) -> None:
    points = [t.coordinates(rank) for rank in range(t.world_size)]
    assert len(set(points)) == t.world_size == t.tp * t.pp * t.dp
    assert [t.first_rank(pp=c.pp, dp=c.dp, tp=c.tp) for c in points] == list(range(t.world_size))
    assert all(0 <= c.pp < t.pp and 0 <= c.dp < t.dp and 0 <= c.tp < t.tp for c in points)
    for rank in (-1, t.world_size):
        with pytest.raises(ValueError, match=f"rank {rank} is outside"):
            t.coordinates(rank)


@settings(max_examples=80, deadline=None)
@given(TOPOLOGIES, st.sampled_from(AXES))
def test_groups_partition_the_world(t: Topology, axis: str) -> None:
    over = t.mesh.dims(axis)
    groups = list(t.mesh.groups(over))
    assert sorted(itertools.chain(*groups)) == list(range(t.world_size))
    assert {len(g) for g in groups} == {getattr(t, axis)}
    for g in groups:
        for place, rank in enumerate(g):
            assert t.mesh.members(rank, over) == g
            here = t.coordinates(rank)
            assert getattr(here, axis) == place
            assert replace(here, **{axis: 0}) == t.coordinates(g[0])


@settings(max_examples=40, deadline=None)
@given(TOPOLOGIES)
def test_tensor_neighbours_are_adjacent_and_stages_far(t: Topology) -> None:
    for g in groups_along(t, "tp"):
        assert g == tuple(range(g[0], g[0] + t.tp)) and g[0] % t.tp == 0
    for g in groups_along(t, "dp"):
        assert {b - a for a, b in itertools.pairwise(g)} <= {t.tp}
    for g in groups_along(t, "pp"):
        assert {b - a for a, b in itertools.pairwise(g)} <= {t.tp * t.dp}


@settings(max_examples=40, deadline=None)
@given(TOPOLOGIES, st.data())
def test_stage_peers(t: Topology, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, t.world_size - 1))
    stages = t.mesh.members(rank, t.mesh.dims("pp"))
    assert [t.stage_peer(rank, s) for s in range(t.pp)] == list(stages)
    assert t.stage_peer(rank, t.pp) == stages[0] and t.stage_peer(rank, -1) == stages[-1]


def test_numbering_is_deepspeeds() -> None:
    """Over all sizes up to 4, by DeepSpeed's own class, in a process of its own (importing it sets module globals)."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    code = """
import itertools, json
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology as T
out = []
for pp, dp, tp in itertools.product(range(1, 5), repeat=3):
    t = T(num_pp=pp, num_mp=tp, num_dp=dp)
    places = [(c.pipe, c.data, c.model) for c in (t.get_coord(r) for r in range(pp * dp * tp))]
    names = {"pp": "pipe", "dp": "data", "tp": "model"}
    lists = {a: sorted(map(list, t.get_axis_comm_lists(n))) for a, n in names.items()}
    out.append([pp, dp, tp, places, lists])
print("=" + json.dumps(out))
"""
    answer = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    rows = json.loads(answer.stdout.splitlines()[-1].removeprefix("="))
    assert len(rows) == 64
    for pp, dp, tp, places, lists in rows:
        t = Topology(tp=tp, pp=pp, dp=dp)
        ours = [t.coordinates(r) for r in range(t.world_size)]
        assert [[c.pp, c.dp, c.tp] for c in ours] == places
        for axis in AXES:
            assert lists[axis] == sorted(list(g) for g in groups_along(t, axis)), (t, axis)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("size", [0, -2])
def test_sizes_below_one_are_refused(axis: str, size: int) -> None:
    with pytest.raises(ConfigError, match=f"{axis} is {size}"):
        Topology(**{axis: size})  # type: ignore[arg-type]  # a number by name


def test_all_ranks_make_the_same_groups_once() -> None:
    """Groups of one rank are not made; each tied pair of stages is."""
    t = Topology(tp=2, pp=3, dp=2)
    made = planned(t)
    assert [c.names[0] for c in made] == ["tp", "dp", "pp", "embedding", "world"]
    assert [len(c.groups) for c in made] == [6, 6, 4, 4, 1]
    assert set(made[3].groups) == {(g[0], g[-1]) for g in groups_along(t, "pp")}
    assert planned(Topology()) == []
    assert [c.names[0] for c in planned(Topology(dp=2))] == ["dp"]


def test_a_large_world_costs_little() -> None:
    """3,072 ranks: the groups are counted without making any."""
    t = Topology(tp=8, pp=64, dp=6)
    assert t.world_size == 3072
    counts = {c.names[0]: len(c.groups) for c in planned(t, two_way=True)}
    assert counts == {"tp": 384, "dp": 512, "pp": 48, "embedding": 48, "pp_reverse": 48, "world": 1}


def test_a_single_process_has_no_groups() -> None:
    ctx = ParallelContext.create(Topology(), "cpu")
    assert ctx.coords == Coordinates(pp=0, dp=0, tp=0) and ctx.device == torch.device("cpu")
    assert ctx.named_groups() == {} and all(ctx.over(axis) is None for axis in AXES)
    assert ctx.is_first_stage and ctx.is_last_stage
    ctx.close()


def test_a_world_of_another_size_is_refused() -> None:
    with pytest.raises(EnvironmentFault, match="1 process is running, and the layout tp 2 × pp 1 × dp 3 needs 6"):
        ParallelContext.create(Topology(tp=2, dp=3), "cpu")


def test_coordinates_read_well() -> None:
    assert str(Coordinates(pp=1, dp=0, tp=3)) == "pp 1, dp 0, tp 3"
    topology = Topology(tp=2, pp=3, dp=2, cp=2)
    assert str(topology.coordinates(11)) == "pp 1, dp 0, cp 1, tp 1" and topology.sizes() == "tp 2 x pp 3 x cp 2 x dp 2"
    assert topology.first_rank(pp=1, cp=1, tp=1) == 11 and Topology(dp=2).sizes("×") == "tp 1 × pp 1 × dp 2"
