"""Learning rate against torch's schedulers; batch ramp-up against counting step by step."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from megatron_port.core.config.checks import problems
from megatron_port.core.config.schema import BatchConfig, OptimizerConfig, RunConfig
from megatron_port.core.errors import ConfigError
from megatron_port.core.optim.schedules import BatchSchedule, learning_rate
from megatron_port.core.registry import LR_SCHEDULES

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def torch_rates(decay: str, lr: float, min_lr: float, warmup: int, end: int, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    if decay == "cosine":
        after: lr_scheduler.LRScheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=end - warmup, eta_min=min_lr)
    elif decay == "linear":
        after = lr_scheduler.LinearLR(optimizer, 1.0, min_lr / lr, total_iters=end - warmup)
    else:
        after = lr_scheduler.ConstantLR(optimizer, 1.0)
    if warmup:
        before = lr_scheduler.LinearLR(optimizer, 1 / (warmup + 1), 1.0, total_iters=warmup)
        schedule: lr_scheduler.LRScheduler = lr_scheduler.SequentialLR(optimizer, [before, after], [warmup])
    else:
        schedule = after
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize("decay", ["cosine", "linear", "constant"])
@pytest.mark.parametrize(("warmup", "end"), [(0, 20), (1, 20), (7, 20), (5, 6), (19, 20)])
def test_rates_equal_torchs(decay: Literal["cosine", "linear", "constant"], warmup: int, end: int) -> None:
    config = OptimizerConfig(lr=3e-3, min_lr=2e-4, warmup_steps=warmup, decay=decay)
    # torch's cosine rises again after its end, so it is compared up to there.
    steps = end + 1 if decay == "cosine" else end + 5
    want = torch_rates(decay, 3e-3, 2e-4, warmup, end, steps)
    got = [learning_rate(config, step, end) for step in range(steps)]
    assert got == pytest.approx(want, rel=1e-9)


def test_rate_corners() -> None:
    config = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=3, decay_steps=10)
    assert [learning_rate(config, s, 1000) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert learning_rate(config, 10, 1000) == learning_rate(config, 999, 1000) == 0.1
    assert learning_rate(OptimizerConfig(lr=1.0), 5, 10) == pytest.approx(0.5 * (1 + math.cos(math.pi / 2)))
    short = OptimizerConfig(lr=1.0, warmup_steps=9)
    assert [learning_rate(short, s, 3) for s in range(3)] == pytest.approx([0.1, 0.2, 0.3])


def test_rate_faults() -> None:
    with pytest.raises(ConfigError, match=r"decay_steps 5.*warmup_steps 5"):
        learning_rate(OptimizerConfig(warmup_steps=5, decay_steps=5), 0, 100)
    with pytest.raises(ConfigError, match="'cosin'"):
        learning_rate(OptimizerConfig(decay="cosin"), 0, 100)


def test_a_plugins_schedule_begins_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES / "lr_schedule")
    monkeypatch.setattr(LR_SCHEDULES, "_added", {})
    import one_minus_square  # noqa: F401 - registers it

    config = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=2, decay="one-minus-square")
    want = [1 / 3, 2 / 3, *(0.1 + 0.9 * (1 - (k / 4) ** 2) for k in range(5)), 0.1]
    assert [learning_rate(config, step, 6) for step in range(8)] == pytest.approx(want, rel=1e-15)
    with pytest.raises(ConfigError, match="expected cosine, linear, constant, wsd, inverse_sqrt, one-minus-square"):
        learning_rate(OptimizerConfig(decay="square"), 0, 100)
    run = replace(RunConfig(), optimizer=OptimizerConfig(decay="square"))
    assert any("optimizer.decay 'square' is unknown; use cosine, " in text and "one-minus-square" in text
               for text in problems(run))


@pytest.mark.parametrize("rate", [math.nan, math.inf, -1e-9])
def test_a_rate_of_a_plugin_that_is_none_is_refused(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LR_SCHEDULES._added, "wrong", lambda settings, step, total: rate)
    with pytest.raises(ConfigError, match=r"optimizer\.decay 'wrong' gives .* at step 3; a rate is 0 or more"):
        learning_rate(OptimizerConfig(decay="wrong"), 3, 10)


@pytest.mark.parametrize("shape", ["linear", "cosine"])
@pytest.mark.parametrize(("warmup", "fall"), [(0, 5), (4, 1), (7, 13)])
def test_warmup_stable_decay_is_three_of_torchs_schedulers(
    shape: Literal["linear", "cosine"], warmup: int, fall: int
) -> None:
    end, lr, low = 20, 3e-3, 2e-4
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    parts: list[lr_scheduler.LRScheduler] = [lr_scheduler.ConstantLR(optimizer, 1.0)]
    if shape == "linear":
        parts.append(lr_scheduler.LinearLR(optimizer, 1.0, low / lr, total_iters=fall))
    else:
        parts.append(lr_scheduler.CosineAnnealingLR(optimizer, T_max=fall, eta_min=low))
    milestones = [end - fall]
    if warmup:
        parts.insert(0, lr_scheduler.LinearLR(optimizer, 1 / (warmup + 1), 1.0, total_iters=warmup))
        milestones.insert(0, warmup)
    schedule = lr_scheduler.SequentialLR(optimizer, parts, milestones)
    want = []
    for _ in range(end + 1):
        want.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    config = OptimizerConfig(
        lr=lr, min_lr=low, warmup_steps=warmup, decay="wsd", wsd_shape=shape, wsd_steps=fall, decay_steps=end
    )
    assert [learning_rate(config, step, 1000) for step in range(end + 1)] == pytest.approx(want, rel=1e-9)


def test_one_minus_sqrt_and_the_length_of_the_fall() -> None:
    config = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=10, decay="wsd")
    rates = [learning_rate(config, s, 110) for s in range(112)]
    assert rates[10:91] == [1.0] * 81  # the last fifth of the 100 steps after the warm-up
    assert rates[95] == pytest.approx(0.1 + 0.9 * (1 - math.sqrt(5 / 20)))
    assert rates[109] == pytest.approx(0.1 + 0.9 * (1 - math.sqrt(19 / 20))) and rates[110:] == [0.1, 0.1]
    # What makes it useful: a longer run has the same rates until it falls.
    assert [learning_rate(config, s, 210) for s in range(91)] == rates[:91]


def test_inverse_square_root() -> None:
    config = OptimizerConfig(lr=1.0, min_lr=0.3, warmup_steps=4, decay="inverse_sqrt")
    rates = [learning_rate(config, s, 10) for s in range(60)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0]) and rates[16] == 0.5
    assert rates[44] == pytest.approx(math.sqrt(4 / 44)) and rates[45] == 0.3
    bare = OptimizerConfig(lr=1.0, decay="inverse_sqrt")
    assert [learning_rate(bare, s, 10) for s in (0, 1, 4)] == [1.0, 1.0, 0.5]


def counted(batch: BatchConfig, steps: int) -> list[tuple[int, int]]:
    """Megatron-LM's rule, one step after the other, in exact fractions."""
    plans, consumed = [], 0
    for _ in range(steps):
        size = batch.global_batch_size
        if batch.rampup_start and batch.rampup_start < size and consumed < batch.rampup_samples:
            stages = (size - batch.rampup_start) // batch.rampup_increment
            size = batch.rampup_start + batch.rampup_increment * (consumed * stages // batch.rampup_samples)
        plans.append((consumed, size))
        consumed += size
    return plans


@settings(max_examples=150, deadline=None)
@given(
    micro=st.integers(1, 3), dp=st.integers(1, 3), start=st.integers(1, 4), increment=st.integers(1, 4),
    stages=st.integers(1, 6), samples=st.integers(1, 600),
)
def test_plans_equal_counting(micro: int, dp: int, start: int, increment: int, stages: int, samples: int) -> None:
    unit = micro * dp
    batch = BatchConfig(
        micro_batch_size=micro, global_batch_size=unit * (start + increment * stages), rampup_start=unit * start,
        rampup_increment=unit * increment, rampup_samples=samples,
    )
    schedule = BatchSchedule(batch, dp)
    want = counted(batch, 200)
    assert [schedule.step_plan(step) for step in range(200)] == want
    assert all(schedule.global_batch(first) == size for first, size in want)
    assert all(size % unit == 0 for _, size in want)
    assert schedule.samples_before(0) == 0
    assert schedule.samples_before(200) == sum(size for _, size in want)


def test_no_rampup_and_a_long_one() -> None:
    flat = BatchSchedule(BatchConfig(global_batch_size=12, micro_batch_size=2), dp=3)
    assert flat.step_plan(10**9) == (12 * 10**9, 12)
    # GPT-3's ramp of the Megatron-LM examples: 16 to 1536 by 16 over 5.86M samples.
    batch = BatchConfig(global_batch_size=1536, rampup_start=16, rampup_increment=16, rampup_samples=5_859_375)
    schedule = BatchSchedule(batch, dp=8)
    assert schedule.step_plan(0) == (0, 16)
    first, size = schedule.step_plan(1_000_000)
    assert size == 1536 and schedule.step_plan(1_000_001) == (first + 1536, 1536)
    assert schedule.global_batch(5_859_374) == 1520 and schedule.global_batch(5_859_375) == 1536


@pytest.mark.parametrize(
    ("fields", "dp", "says"),
    [
        ({"global_batch_size": 9, "micro_batch_size": 2}, 2, "data_parallel_size 2 = 4; use 8 or 12"),
        ({"global_batch_size": 0}, 1, "global_batch_size is 0"),
        ({"micro_batch_size": 0}, 1, "micro_batch_size is 0"),
        ({"rampup_start": 3, "rampup_increment": 2, "rampup_samples": 9}, 2, "rampup_start 3"),
        ({"rampup_start": 2, "rampup_increment": 3, "rampup_samples": 9}, 2, "rampup_increment 3"),
        ({"rampup_start": 2, "rampup_increment": 0, "rampup_samples": 9}, 1, "they are 0 and 9"),
        ({"rampup_start": 2, "rampup_increment": 4, "rampup_samples": 9}, 1, "does not divide by rampup_increment 4"),
        ({"rampup_start": 4, "rampup_increment": 4}, 1, "they are 4 and 0"),
        ({"rampup_start": 16, "rampup_increment": 4, "rampup_samples": 9}, 1, "is not below"),
        ({"rampup_start": -4, "rampup_increment": 4, "rampup_samples": 9}, 1, "rampup_start is -4"),
    ],
)
def test_batch_faults(fields: dict[str, int], dp: int, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        BatchSchedule(BatchConfig(**fields), dp)
    assert says in str(caught.value)
