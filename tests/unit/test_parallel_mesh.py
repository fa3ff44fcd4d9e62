"""The mesh: which sizes make a grid, that its arithmetic is a bijection, and that sums, owners and tokens add up."""

from __future__ import annotations

import itertools
from collections import Counter
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_port.core.dist import mesh as mesh_module
from megatron_port.core.dist.groups import ParallelContext, planned
from megatron_port.core.dist.mesh import REPLICAS, SETS, SHARDED, Coordinates, Mesh, Topology, communicators, purposes
from megatron_port.core.dist.record import SEQUENCE, InitSpec, Shard, make_record
from megatron_port.core.errors import ConfigError

EXAMPLES = settings(max_examples=100, deadline=None)
SIZES = st.sampled_from([1, 1, 1, 2, 2, 3, 4])
GRIDS: dict[str, Any] = {
    "tp": SIZES, "cp": SIZES, "dp_shard": SIZES, "dp_replicate": SIZES, "pp": st.integers(1, 3),
    "ep": st.sampled_from([1, 1, 2, 3, 4, 6, 8, 16]), "halves": st.booleans(),
}


def grid(tp: int, cp: int, dp_shard: int, dp_replicate: int, pp: int, ep: int, halves: bool) -> Mesh | None:
    """The mesh of these sizes, or None where they make none."""
    sizes = {"tp": tp, "cp": cp, "dp_shard": dp_shard, "dp_replicate": dp_replicate}
    copies = 2 if halves and tp % 2 == 0 else 1
    try:
        return Mesh.of(sizes, pp=pp, ep=ep, kv_copies=copies)
    except ConfigError:
        return None


@EXAMPLES
@given(st.fixed_dictionaries(GRIDS))
def test_sizes_are_accepted_where_the_cuts_form_a_chain(sizes: dict[str, Any]) -> None:
    dense = [sizes[name] for name in mesh_module.DENSE]
    stage = prod(dense)
    cuts = {1, sizes["ep"], stage, *itertools.accumulate(dense, lambda a, b: a * b)}
    if sizes["halves"] and sizes["tp"] % 2 == 0:
        cuts.add(2)
    chain = sorted(cuts)
    legal = stage % sizes["ep"] == 0 and all(b % a == 0 for a, b in itertools.pairwise(chain))
    assert (grid(**sizes) is not None) == legal


@EXAMPLES
@given(st.fixed_dictionaries(GRIDS), st.data())
def test_groups_partition_the_world_and_agree_with_the_arithmetic(sizes: dict[str, Any], data: st.DataObject) -> None:
    mesh = grid(**sizes)
    if mesh is None or mesh.world > 600:
        return
    names = data.draw(st.sets(st.sampled_from(sorted(mesh.axes)), max_size=3))
    over = mesh.dims(*names)
    groups = list(mesh.groups(over))
    assert sorted(itertools.chain(*groups)) == list(range(mesh.world))
    assert [g[0] for g in groups] == sorted(g[0] for g in groups)
    for group in groups:
        assert list(group) == sorted(group) and len(group) == mesh.size(over)
        for place, rank in enumerate(group):
            assert mesh.members(rank, over) == group
            assert mesh.index(rank, over) == place and mesh.first(rank, over) == group[0]
    # Positions along all axes of either division tell the ranks apart.
    for division in (("pp", *mesh_module.DENSE), ("pp", "edp", "ep")):
        points = {tuple(mesh.index(rank, mesh.dims(axis)) for axis in division) for rank in range(mesh.world)}
        assert len(points) == mesh.world


WIDEST = {"tp": 4, "cp": 2, "dp_shard": 4, "dp_replicate": 2, "pp": 2, "ep": 16, "halves": True}
"""A layout with as many communicators as any has."""


@EXAMPLES
@given(st.fixed_dictionaries(GRIDS), st.booleans(), st.booleans())
@example(WIDEST, True, True)
def test_all_ranks_create_the_same_communicators(sizes: dict[str, Any], tied: bool, reverse: bool) -> None:
    mesh = grid(**sizes)
    if mesh is None or mesh.world > 600:
        return
    made = communicators(mesh, purposes(mesh, tied_ends=tied, reverse=reverse))
    held: Counter[int] = Counter()
    for communicator in made:
        ranks = [rank for group in communicator.groups for rank in group]
        assert len(ranks) == len(set(ranks)) and all(len(group) > 1 for group in communicator.groups)
        held.update(ranks)
    assert max(held.values(), default=0) <= 12
    # Two communicators have the same groups only where messages must not queue behind one another.
    plain = [c.groups for c in made if c.names[0] not in (mesh_module.EMBEDDING, mesh_module.REVERSE)]
    assert len(plain) == len(set(plain))
    names = [name for c in made for name in c.names]
    assert len(names) == len(set(names))


def _context(mesh: Mesh, rank: int) -> ParallelContext:
    class Placed(Topology):
        pass

    topology = Placed()
    vars(topology)["mesh"] = mesh  # in place of the cached property
    return ParallelContext(topology, rank, torch.device("cpu"), Coordinates(0, 0, 0))


@EXAMPLES
@given(st.fixed_dictionaries(GRIDS), st.booleans())
def test_every_element_is_owned_once_however_state_is_spread(sizes: dict[str, Any], sharded: bool) -> None:
    """Columns, rows, key/value heads, norms, experts: owned once among the ranks that hold the same piece of state."""
    mesh = grid(**sizes)
    if mesh is None or mesh.world > 200:
        return
    zero_dims = mesh.dims(*SHARDED) if sharded else frozenset()
    both = mesh.size(mesh.dims("tp") | mesh.dims("ep"))
    shape = (2 * both * mesh.size(mesh.dims("tp")), 3)
    kinds: list[tuple[tuple[Shard, ...], tuple[str, ...]]] = [
        ((Shard(0, ("tp",)),), REPLICAS), ((Shard(0, ("kv_heads",)),), (*REPLICAS, "kv_copies")), ((), REPLICAS),
        ((), SEQUENCE), ((Shard(0, ("ep",)),), SEQUENCE),
    ]
    for shards, partial in kinds:
        owned: Counter[tuple[int, int]] = Counter()
        for rank in mesh.members(0, mesh.stage):
            record = make_record("w", shape, _context(mesh, rank), init=InitSpec("zeros"), decay=False, shards=shards,
                                 partial_over=partial)
            mine = zero_dims & record.replicated_over(mesh)
            if record.is_owned(mesh, rank, zero_dims=zero_dims):
                piece = mesh.index(rank, mine)
                start = record.offset[0]
                owned.update((element, piece) for element in range(start, start + record.extent[0]))
        pieces = mesh.size(mine)
        assert owned == Counter(itertools.product(range(shape[0]), range(pieces)))


@EXAMPLES
@given(st.fixed_dictionaries(GRIDS))
def test_each_token_counts_once_in_each_gradient(sizes: dict[str, Any]) -> None:
    """A rank adds its own tokens' part; summed over what a record says, a gradient has had every token once."""
    mesh = grid(**sizes)
    if mesh is None or mesh.world > 200:
        return
    stage = mesh.members(0, mesh.stage)
    tp, tokens = mesh.dims("tp"), mesh.dims(*REPLICAS)

    def parts(rank: int, *, sequence: bool) -> set[tuple[int, int]]:
        """(samples and positions, slice of the sequence) that a rank's own gradient has seen."""
        seen = [mesh.index(rank, tp)] if sequence else range(mesh.size(tp))
        return {(mesh.index(rank, tokens), piece) for piece in seen}

    every = set(itertools.product(range(mesh.size(tokens)), range(mesh.size(tp))))
    for partial, sequence in ((REPLICAS, False), (SEQUENCE, True)):
        record = make_record("norm", (3,), _context(mesh, 0), init=InitSpec("ones"), decay=False, partial_over=partial)
        over = record.reduces_over(mesh)
        for rank in stage:
            seen = [part for member in mesh.members(rank, over) for part in parts(member, sequence=sequence)]
            assert len(seen) == len(set(seen)) and set(seen) == every


def test_sizes_that_make_no_grid_are_named() -> None:
    with pytest.raises(ConfigError, match=r"ep 6 .* tp 4 .* at 4 and at 6, and 4 does not divide 6"):
        Mesh.of({"tp": 4, "dp_shard": 3}, ep=6)
    with pytest.raises(ConfigError, match="ep 5 does not divide the 4 ranks"):
        Mesh.of({"tp": 4}, ep=5)
    with pytest.raises(ConfigError, match="no axis xp"):
        Mesh.of({"xp": 2})
    with pytest.raises(ConfigError, match="shard size 3 does not divide dp 4"):
        Topology(dp=4, shard=3)


def test_a_set_that_nobody_planned_is_refused() -> None:
    """A look-up that returned None would be a sum that is silently left out."""
    topology = Topology(tp=2, pp=2, dp=2)
    ctx = ParallelContext(topology, 0, torch.device("cpu"), topology.coordinates(0), groups={})
    with pytest.raises(KeyError, match=r"no communicator over tp\+pp was made; add the set to mesh.SETS"):
        ctx.over("tp", "pp")
    with pytest.raises(KeyError):
        ctx.over("xp")
    assert ParallelContext.single().over("tp", "dp") is None
    assert ParallelContext(topology, 0, torch.device("cpu"), topology.coordinates(0)).over("tp", "pp") is None


def test_every_planned_set_exists_on_every_layout() -> None:
    for tp, pp, dp, shard, copies in itertools.product((1, 2, 4), (1, 2), (1, 4), (0, 2), (1, 2)):
        if tp % copies or (shard and dp % shard):
            continue
        topology = Topology(tp=tp, pp=pp, dp=dp, shard=shard, kv_copies=copies)
        made = {name for c in planned(topology) for name in c.names}
        for axes in SETS:
            assert ("+".join(axes) in made) == (topology.mesh.size(topology.mesh.dims(*axes)) > 1)
