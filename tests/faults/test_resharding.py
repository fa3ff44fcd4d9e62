"""Some of ``make soak``'s thirty random pairs of layouts, engines and precisions."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import resharding
from pool import RankPool

SEEDS = (7, 9, 23, 25, 27, 57)
"""Few ranks; both engines, four precisions."""


@pytest.mark.slow  # make test has tests/distributed/test_resume.py and test_interop.py
@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_resumes_elsewhere(ranks: RankPool, tmp_path: Path, seed: int) -> None:
    trip = resharding.draw(seed)
    if (trip.source.deepspeed or trip.target.deepspeed) and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    row = resharding.round_trip(ranks, trip, tmp_path)
    assert row["ok"], row


SHARDINGS: tuple[dict[str, Any], ...] = (
    {"zero_stage": 3, "shard_size": 2}, {"zero_stage": 1}, {"zero_stage": 3, "reshard": "step"}, {"zero_stage": 0},
    {"zero_stage": 2, "shard_size": 2}, {"zero_stage": 3},
)


def test_state_crosses_between_zero_stages_to_the_bit(ranks: RankPool, tmp_path: Path) -> None:
    """Each saves what the one before has saved and loaded: masters, moments and weights."""
    names, before = set(), tmp_path / "0"
    for i, sharding in enumerate(SHARDINGS):
        config = resharding.make_config(
            dtype="bf16", layout={"data_parallel_size": 4, **sharding}, micro_batch_size=1, global_batch_size=8
        )
        side = resharding.Side(config, resharding.Topology(dp=4, shard=config.layout.shard_size))
        names = names or set(resharding.parameter_shapes(config.model))
        if i == 0:
            ranks.run(4, resharding.train_and_save, side, before)
            continue
        after = tmp_path / str(i)
        losses = ranks.run(4, resharding.resume, side, before, after)[0]
        assert resharding.state_faults(before, after, names, same_precision=True) == [], sharding
        assert len(set(losses)) == resharding.MORE
        before = after


def test_the_thirty_are_varied() -> None:
    drawn = [resharding.draw(seed) for seed in range(30)]
    sides = [side for c in drawn for side in (c.source, c.target)]
    assert {(c.source.config.engine, c.target.config.engine) for c in drawn} == {
        (a, b) for a in ("native", "deepspeed") for b in ("native", "deepspeed")
    }
    assert {side.config.precision.dtype for side in sides} >= {"fp64", "fp32", "bf16", "fp16"}
    assert {side.config.layout.pipeline_schedule for side in sides if side.topology.pp > 1} == {
        "gpipe", "1f1b", "zb-h1", "zb-v"
    }
    assert {(side.config.layout.zero_stage, side.config.engine) for side in sides if side.topology.dp > 1} == {
        (0, "native"), (1, "native"), (2, "native"), (3, "native"), (1, "deepspeed")
    }
    assert {side.config.layout.shard_size for side in sides} == {0, 2}
    assert {side.config.layout.reshard for side in sides} == {"forward", "step"}
    assert len({str(side.topology) for side in sides}) >= 12
    assert all(str(c.source) != str(c.target) for c in drawn)


def test_the_judge_sees_one_bit_and_one_loss(ranks: RankPool, tmp_path: Path) -> None:
    """A weight that differs in its last bit, a moment left at zero, a loss beyond the bound."""
    trip = resharding.draw(0)
    side = resharding.Side(resharding.make_config(layout={"zero_stage": 0}), resharding.Topology())
    went_on = ranks.run(1, resharding.train_and_save, side, tmp_path / "a")[0]
    ranks.run(1, resharding.train_and_save, side, tmp_path / "b")
    names = set(resharding.parameter_shapes(side.config.model))
    assert resharding.state_faults(tmp_path / "a", tmp_path / "b", names, same_precision=True) == []
    nudged = resharding.Side(
        resharding.dataclasses.replace(side.config, seed=side.config.seed + 1), side.topology
    )
    ranks.run(1, resharding.train_and_save, nudged, tmp_path / "c")
    assert resharding.state_faults(tmp_path / "a", tmp_path / "c", names, same_precision=True)
    off = [(loss * (1 + 3e-5), norm) for loss, norm in went_on]
    assert all(d.ok for d in resharding.loss_deviations(side, None, went_on, [went_on, went_on]))
    assert not all(d.ok for d in resharding.loss_deviations(side, None, off, [went_on, went_on]))
    assert trip.seed == 0
