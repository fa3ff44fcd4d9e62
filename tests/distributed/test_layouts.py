"""The layout matrix: every split trains as one process does, in either engine (docs/parity.md has the measured table)."""

from __future__ import annotations

import itertools
from functools import lru_cache

import pytest
from cases import REORDERINGS, Reordering, make_config, run_cases, single_run
from pool import RankPool

from megatron_port.config.schema import RunConfig
from megatron_port.parallel.topology import Topology
from megatron_port.train.parity import FP32, FP64, Deviation, Run, Tolerance, compare, spread

LAYOUTS = [*itertools.product((1, 2), (1, 2), (1, 2)), (1, 4, 1), (2, 4, 1)]
"""(tp, pp, dp)"""
STEPS = 3


@lru_cache(maxsize=64)
def reference(config: RunConfig, reordering: Reordering | None = None) -> Run:
    """The single-process run of a configuration (its layout does not matter)."""
    return single_run(config, steps=STEPS, reordering=reordering)


def half_tolerance(config: RunConfig) -> Tolerance:
    """Twice what reordering the sums of one process changes."""
    runs = [reference(config), *(reference(config, r) for r in REORDERINGS)]
    return spread(runs, config.model, name=config.precision.dtype, floor=FP32).scaled(2.0)


def check(config: RunConfig, topology: Topology, traces: list) -> list[Deviation]:
    """Compare a layout's run with one process; the test fails with the whole table."""
    dtype = config.precision.dtype
    tolerance = {"fp64": FP64, "fp32": FP32}.get(dtype) or half_tolerance(plain(config))
    lr = 1e-2 if dtype == "fp64" else 0.0
    deviations = compare(reference(plain(config)), Run.of(traces), tolerance, config.model, lr=lr)
    bad = [d for d in deviations if not d.ok]
    assert not bad, f"{topology} {config.engine} {config.layout}:\n" + "\n".join(map(str, deviations))
    return deviations


def plain(config: RunConfig) -> RunConfig:
    """The configuration without its layout, so that equal references are computed once."""
    from dataclasses import replace

    from megatron_port.config.schema import LayoutConfig

    return replace(config, engine="native", layout=LayoutConfig(vocab_padding_multiple=1))


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
    """Cases by world size; each layout gets the variant of its position, so a subset still mixes them."""
    by_world: dict[int, list] = {}
    for i, (tp, pp, dp) in enumerate(layouts):
        for model, layout in (variants()[i % 6], variants()[(i + 3) % 6]):
            model = {**model, **({"num_layers": 5} if pp == 4 else {})}
            config = make_config(engine=engine, dtype=dtype, model=model, layout=layout, mask_loss=i % 2 == 1)
            by_world.setdefault(tp * pp * dp, []).append((config, Topology(tp, pp, dp), STEPS, 1))
    return by_world


@pytest.mark.parametrize("engine,dtype", [("native", "fp64"), ("deepspeed", "fp32"), ("deepspeed", "bf16"),
                                          ("native", "bf16")])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_layout_equals_one_process(ranks: RankPool, engine: str, dtype: str, world: int) -> None:
    cases = _cases(engine, dtype, LAYOUTS)[world]
    results = ranks.run(world, run_cases, cases, timeout=240, deepspeed=engine == "deepspeed")
    for i, (config, topology, _, _) in enumerate(cases):
        check(config, topology, [result[i] for result in results])
