"""The layout matrix: every split trains as one process does, in either engine (benchmarks/evidence/parity.md)."""

from __future__ import annotations

import dataclasses

import pytest
from cases import make_config
from drawing import Draw
from fuzz import failures, run_draws
from matrix import LAYOUTS, replica_matrix, schedule_matrix
from pool import RankPool

from megatron_port.core.dist.mesh import Topology


def variants() -> list[tuple[dict, dict]]:
    """(model, layout) choices that between them cover every pair of: tied, dropout, sequence parallel, recompute."""
    return [
        ({"tie_embeddings": True, "hidden_dropout": 0.1, "attention_dropout": 0.1},
         {"sequence_parallel": True, "recompute": "full"}),
        ({"tie_embeddings": False, "hidden_dropout": 0.0}, {"sequence_parallel": False, "recompute": "none"}),
        ({"tie_embeddings": True, "hidden_dropout": 0.0}, {"sequence_parallel": True, "recompute": "none"}),
        ({"tie_embeddings": False, "hidden_dropout": 0.1, "attention_dropout": 0.1},
         {"sequence_parallel": False, "recompute": "full"}),
        ({"tie_embeddings": True, "hidden_dropout": 0.1}, {"sequence_parallel": False, "recompute": "selective"}),
        ({"tie_embeddings": False, "hidden_dropout": 0.0, "num_query_groups": 2, "position_embedding": "rope",
          "normalization": "rmsnorm", "activation": "swiglu", "add_bias": False},
         {"sequence_parallel": True, "recompute": "selective"}),
    ]


def _cases(engine: str, dtype: str, layouts: list[tuple[int, int, int]]) -> dict[int, list]:
    """Cases by world size; each layout gets the variant of its position, so a subset still mixes them.

    Own kernels and none in turn.
    """
    by_world: dict[int, list] = {}
    for i, (tp, pp, dp) in enumerate(layouts):
        own, (model, layout) = (("on", variants()[i % 6]), ("off", variants()[(i + 3) % 6]))[i // 2 % 2]
        model = {**model, **({"num_layers": 5} if pp == 4 else {})}
        config = make_config(
            engine=engine, dtype=dtype, model=model, layout=layout, mask_loss=i % 2 == 1, own_kernels=own
        )
        by_world.setdefault(tp * pp * dp, []).append((config, Topology(tp, pp, dp)))
    return by_world


KINDS = [("native", "fp64"), ("deepspeed", "bf16"), ("deepspeed", "fp32"), ("native", "bf16")]


def _quick(world: int, engine: str, dtype: str) -> bool:
    """Whether it runs without SLOW=1: each kind once or twice; the fuzz draws the others too."""
    return (engine, dtype) in {4: (KINDS[0], KINDS[2], KINDS[3]), 8: (KINDS[1],)}.get(world, ())


@pytest.mark.parametrize(("world", "engine", "dtype"), [
    pytest.param(world, *kind, marks=() if _quick(world, *kind) else pytest.mark.slow)
    for world in (1, 2, 4, 8) for kind in KINDS
])
def test_layout_equals_one_process(ranks: RankPool, engine: str, dtype: str, world: int) -> None:
    cases = _cases(engine, dtype, LAYOUTS)[world]
    results = run_draws(ranks, [Draw(i, config, topology) for i, (config, topology) in enumerate(cases)])
    assert not failures(results), failures(results)
    assert len(results) == len(cases)


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 4, pytest.param(8, marks=pytest.mark.slow)])
def test_every_schedule_equals_one_process(ranks: RankPool, world: int) -> None:
    """In fp64, where nothing hides behind rounding; fp32 and bf16 were run once (benchmarks/evidence/parity.md)."""
    draws = [d for d in schedule_matrix(("fp64",)) if d.topology.world_size == world]
    # Of several layouts of a size one for each schedule, stage and kind of table, another for each.
    layouts = sorted({dataclasses.astuple(d.topology) for d in draws})
    kinds: dict[tuple[object, ...], list[Draw]] = {}
    for one in sorted(draws, key=lambda d: layouts.index(dataclasses.astuple(d.topology))):
        layout = one.config.layout
        kind = (layout.pipeline_schedule, layout.virtual_pipeline_size, layout.zero_stage,
                one.config.model.tie_embeddings)
        kinds.setdefault(kind, []).append(one)
    draws = [members[number % len(members)] for number, members in enumerate(kinds.values())]
    # Tied ones with half as many micro-batches, so that a pipeline is also seen when it is hardly filled.
    draws = [dataclasses.replace(d, config=dataclasses.replace(d.config, batch=dataclasses.replace(
                 d.config.batch, micro_batch_size=1 + d.config.model.tie_embeddings))) for d in draws]
    results = run_draws(ranks, draws)
    assert not failures(results), failures(results)
    ran = {(d.config.layout.pipeline_schedule, d.config.layout.zero_stage, d.config.model.tie_embeddings)
           for d, _ in results}
    stages = {(name, 1) for name in ("gpipe", "1f1b", "zb-h1", "zb-v")}
    assert ran >= {(*stage, tied) for stage in stages for tied in (True, False)}
    assert world != 4 or {(name, 2, tied) for name in ("gpipe", "1f1b") for tied in (True, False)} <= ran


@pytest.mark.parametrize("world", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_replicas_and_shards_equal_one_process(ranks: RankPool, world: int) -> None:
    """dp 4 with every ZeRO stage, split over all replicas and over two of them; in fp64."""
    draws = [d for d in replica_matrix() if d.topology.world_size == world]
    if world == 8:  # tied without tp, untied with it
        draws = [d for d in draws if d.config.model.tie_embeddings == (d.topology.tp == 1)]
    else:
        draws = [d for d in draws if d.config.model.tie_embeddings == bool(d.config.layout.shard_size)]
    results = run_draws(ranks, draws)
    assert not failures(results), failures(results)
    ran = {(d.config.layout.zero_stage, d.config.layout.shard_size) for d, _ in results}
    assert ran == {(0, 0), (1, 0), (1, 2), (2, 0), (2, 2)}
