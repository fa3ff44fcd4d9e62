"""What users set beside the optimizer's rule trains on every layout as on one process, to 1e-9 in fp64."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from cases import LR, make_batches, make_config, providers_of, run_cases, single_run
from pool import RankPool

from megatron_port.core.config.schema import OptimizerConfig, ParameterGroup, RunConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.run.build import build_engine
from megatron_port.tools.parity.comparison import FP32, FP64, Run, compare

STEPS = 6
MODEL = {"tie_embeddings": False, "vocab_size": 53, "mup_base_size": 8}
GROUPS = (
    ParameterGroup(match="layers.1.mlp.*", lr_factor=0.5, weight_decay=0.4),
    ParameterGroup(match="norm", weight_decay=0.3),
    ParameterGroup(match="embedding", lr_factor=3.0),
    ParameterGroup(match="head", lr_factor=0.0),
)
LAYOUTS: tuple[tuple[Topology, dict[str, Any]], ...] = (
    (Topology(2, 2, 1), {"sequence_parallel": True, "vocab_padding_multiple": 8}),
    (Topology(2, 1, 2), {"zero_stage": 2}),
    (Topology(1, 1, 4), {"zero_stage": 3}),
)


def with_options(config: RunConfig, **other: Any) -> RunConfig:
    """z-loss, muP, groups, clipping that acts in some of the steps, averaged weights in evaluations."""
    options = dataclasses.replace(
        config.optimizer, groups=GROUPS, clip_value=0.02, clip_zscore=0.1, clip_decay=0.02, clip_warmup=2,
        ema_decay=0.7, ema_evaluate=True, **other,
    )
    return dataclasses.replace(config, training=dataclasses.replace(config.training, z_loss=0.02), optimizer=options)


def run(configs: list[RunConfig], topologies: list[Topology]) -> list[tuple[Any, list[float]]]:
    """Each run on this rank, and its evaluations by the averaged weights, of which the last two are of one state."""
    out = []
    traces = run_cases([(c, t, STEPS, 1) for c, t in zip(configs, topologies)])
    for config, topology, trace in zip(configs, topologies, traces):
        ctx = ParallelContext.create(dataclasses.replace(topology), "cpu")
        try:
            engine = build_engine(config, ctx, providers_of(config))
            batches, found = make_batches(config, ctx), []
            for step in range(3):
                with engine.evaluated_weights():
                    found.append(engine.eval_step(batches(0)).loss)
                engine.train_step(batches(step), step=step, lr=LR)
            before = engine.eval_step(batches(0)).loss
            for _ in range(2):
                with engine.evaluated_weights():
                    found.append(engine.eval_step(batches(0)).loss)
            assert engine.eval_step(batches(0)).loss == before, "the weights are not as they were"
            out.append((trace, found))
        finally:
            ctx.close()
    return out


@pytest.fixture(scope="module")
def alone() -> tuple[Run, list[float]]:
    ((trace, found),) = run([with_options(make_config(dtype="fp64", model=MODEL))], [Topology()])
    return Run.of([trace]), found


def test_options_on_every_layout(ranks: RankPool, alone: tuple[Run, list[float]]) -> None:
    configs = [with_options(make_config(dtype="fp64", model=MODEL, layout=dict(layout))) for _, layout in LAYOUTS]
    results = ranks.run(4, run, configs, [topology for topology, _ in LAYOUTS])
    for number, config in enumerate(configs):
        deviations = compare(alone[0], Run.of([r[number][0] for r in results]), FP64, config.model, lr=LR)
        assert deviations and all(d.ok for d in deviations), "\n".join(str(d) for d in deviations if not d.ok)
        for _, losses in (r[number] for r in results):
            assert losses == pytest.approx(alone[1], rel=1e-9)


def test_the_options_change_the_run(alone: tuple[Run, list[float]]) -> None:
    """Each of them: without it losses, norms or evaluations are others."""
    base, (whole, averaged) = with_options(make_config(dtype="fp64", model=MODEL)), alone
    assert averaged[3] == averaged[4] and len(set(averaged)) == 4
    plain = OptimizerConfig()
    for name in ("groups", "clip_value", "clip_zscore"):
        optimizer = dataclasses.replace(base.optimizer, **{name: getattr(plain, name)})
        other = single_run(dataclasses.replace(base, optimizer=optimizer), steps=STEPS)
        assert abs(other.losses[-1] - whole.losses[-1]) > 1e-6, name
    first = single_run(dataclasses.replace(base, training=dataclasses.replace(base.training, z_loss=0.0)), steps=1)
    assert abs(first.losses[0] - whole.losses[0]) > 1e-2


def test_deepspeed_has_groups_mup_and_z_loss(ranks: RankPool) -> None:
    config = make_config(engine="deepspeed", model=MODEL)
    config = dataclasses.replace(
        config, optimizer=dataclasses.replace(config.optimizer, groups=GROUPS),
        training=dataclasses.replace(config.training, z_loss=0.02),
    )
    results = ranks.run(4, run_cases, [(config, Topology(2, 1, 2), 2, 1)], deepspeed=True)
    deviations = compare(
        single_run(config, steps=2), Run.of([r[0] for r in results]), FP32, config.model, lr=LR
    )
    assert deviations and all(d.ok for d in deviations), "\n".join(str(d) for d in deviations if not d.ok)
