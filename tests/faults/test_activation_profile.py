"""Activation plans from measured steps: no bit changes when one takes over, ranks agree, and it is used again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pool import RankPool
from test_numerics import config_of, session_of

from megatron_port.core.config.schema import ActivationsConfig, RunConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.errors import ConfigError
from megatron_port.ext.memory.sites import RECOMPUTED
from megatron_port.run.trainer import Trainer
from megatron_port.tools.plan.activation_file import NAME, parsed
from megatron_port.tools.plan.case import Machine, case_of
from megatron_port.tools.plan.memory import stage_memory
from megatron_port.tools.plan.planner_hook import ActivationPlanner

TWO_STAGES = Topology(1, 2, 1)


@pytest.fixture(scope="module")
def worlds() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


def train(config: RunConfig, steps: int, found: bool = False) -> tuple[Any, ...]:
    """The real loop to so many steps: the choices of this rank's layers, how often it measured, the weights."""
    ctx = ParallelContext.create(TWO_STAGES, "cpu")
    try:
        trainer = Trainer(dataclasses.replace(session_of(config, ctx), plans_activations=found))
        trainer.state.config = dataclasses.replace(config, training=dataclasses.replace(config.training, steps=steps))
        trainer.run()
        measured = sum(hook.measured for hook in trainer.state.hooks if isinstance(hook, ActivationPlanner))
        weights = {r.name: p.tolist() for r, p in trainer.state.engine.named_parameters()}
        return trainer.state.choices, measured, weights
    finally:
        ctx.close()


def losses(config: RunConfig) -> list[tuple[float, float]]:
    text = (Path(config.output_dir) / config.name / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines if "grad_norm" in line]


def test_a_measured_plan_changes_no_bit_and_is_used_again(worlds: RankPool, tmp_path: Path) -> None:
    layout = {"pipeline_parallel_size": 2}
    plain = config_of(tmp_path, "plain", layout=layout)
    plain = dataclasses.replace(plain, optimizer=dataclasses.replace(plain.optimizer, decay_steps=8))
    case, _ = case_of(plain, 2)
    machine = Machine(cluster=plain.cluster, hardware=plain.hardware)
    none, all_again = (
        (memory.activations + memory.working) / 2**30
        for memory in (stage_memory(dataclasses.replace(case, dropped=dropped), machine, 0)
                       for dropped in ((), (RECOMPUTED,) * 2))
    )
    profile = dataclasses.replace(
        config_of(tmp_path, "profile", layout=layout, save_interval=4),
        activations=ActivationsConfig(policy="profile", measure=2, budget=(none + all_again) / 2),
        optimizer=plain.optimizer,
    )
    wanted = worlds.run(2, train, plain, 6, timeout=120.0)
    first = worlds.run(2, train, profile, 4, timeout=120.0)
    assert first[0][:2] == first[1][:2] and first[0][1] == 2  # both ranks measured and hold the same plan
    made = json.loads((tmp_path / "profile" / NAME).read_text())
    choices = first[0][0]
    assert made["layers"] == ["+".join(sites) for sites in choices] and made["source"] == "measured"
    assert len(made["measures"]) == 2
    assert all(min(row[1], row[-4], row[-3], row[-2]) > 0 for row in made["measures"])  # both passes, and the copies
    assert choices != (RECOMPUTED,) * 2 and any(choices)
    again = worlds.run(2, train, profile, 6, timeout=120.0)
    assert [rank[:2] for rank in again] == [(choices, 0)] * 2
    assert json.loads((tmp_path / "profile" / NAME).read_text()) == made
    assert losses(profile) == losses(plain)
    assert [rank[2] for rank in again] == [rank[2] for rank in wanted]
    roomy = dataclasses.replace(profile, activations=dataclasses.replace(profile.activations, budget=1.0))
    other = worlds.run(2, train, roomy, 6, timeout=120.0)
    assert other[0][1] == 2  # measured anew
    planned = dataclasses.replace(
        profile, name="planned", activations=ActivationsConfig(policy="plan", layers=("norm1", "qkv+core"))
    )
    for found, layers, taken in ((False, ("norm1", "qkv+core"), "qkv+core"), (True, ("", "norm2"), "qkv+core"),
                                 (False, ("", "norm2"), "norm2")):  # begun, planned otherwise, and as its user says
        now = dataclasses.replace(planned, activations=ActivationsConfig(policy="plan", layers=layers))
        ranks = worlds.run(2, train, now, 6, found, timeout=120.0)
        assert ["+".join(sites) for sites in ranks[0][0]][1] == taken
        assert [rank[2] for rank in ranks] == [rank[2] for rank in wanted]
        assert losses(planned) == losses(plain)
    events = (tmp_path / "profile" / "events.jsonl").read_text()
    assert "measured: not kept" in events and "measured in the run's first 2 steps" in events


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "not of version 1"), ({"layers": ["norm1"]}, "layers has 1 entries; expected 2"),
        ({"layers": ["norm1", "qkv:partition"]}, "'qkv' is no site that can be partitioned"),
        ({"measures": [["x"]]}, "measures.0.0 is \"x\""), ({"more": 1}, "'more' is missing or unknown"),
    ],
)
def test_a_damaged_file_is_no_plan(change: dict[str, Any], message: str) -> None:
    whole = {"version": 1, "key": "k", "source": "planned", "layers": ["", "norm1"], "stages": [], "step": 0,
             "measures": []}
    assert parsed(json.dumps(whole), num_layers=2).layers == ("", "norm1")
    with pytest.raises(ConfigError, match=message):
        parsed(json.dumps(whole | change), num_layers=2)
    with pytest.raises(ConfigError, match="is no JSON"):
        parsed("{", num_layers=2)
