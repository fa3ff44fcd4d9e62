"""The dynamic loss scale: its rules written out, torch's update as oracle, its state in checkpoints."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_port.core.config.schema import PrecisionConfig
from megatron_port.core.errors import EXIT_NUMERICS, NumericsError
from megatron_port.core.optim.gradients import LossScaler


def scaler(**changes: float) -> LossScaler:
    values = {
        "dtype": "fp16", "initial_loss_scale": 1024.0, "loss_scale_window": 3, "min_loss_scale": 1.0,
        "loss_scale_hysteresis": 1, "max_skipped_steps": 50, **changes,
    }
    return LossScaler(PrecisionConfig(**values))  # type: ignore[arg-type]


def feed(s: LossScaler, steps: str) -> list[float]:
    """``.`` a good step, ``x`` an overflow; the scale after each."""
    scales = []
    for step in steps:
        s.update(step == "x")
        scales.append(s.scale)
    return scales


def test_it_doubles_after_a_window_of_good_steps() -> None:
    assert feed(scaler(), "......") == [1024, 1024, 2048, 2048, 2048, 4096]


def test_an_overflow_starts_the_window_again() -> None:
    assert feed(scaler(), "..x..." ) == [1024, 1024, 512, 512, 512, 1024]


def test_hysteresis_forgives_overflows_and_is_restored_by_a_full_window() -> None:
    # Two are forgiven between them: the second halves. It is spent then, so the next one halves at once.
    assert feed(scaler(loss_scale_hysteresis=2), "x.x.x") == [1024, 1024, 512, 512, 256]
    assert feed(scaler(loss_scale_hysteresis=2), "xx...x") == [1024, 512, 512, 512, 1024, 1024]
    assert feed(scaler(loss_scale_hysteresis=3), "xxxx") == [1024, 1024, 512, 256]


def test_the_floor() -> None:
    s = scaler(min_loss_scale=256.0)
    assert feed(s, "xxxx") == [512, 256, 256, 256]
    assert feed(s, "...") == [256, 256, 512]


def test_too_many_skips_in_a_row_stop_the_run() -> None:
    s = scaler(max_skipped_steps=3)
    feed(s, "xx.xx")
    with pytest.raises(NumericsError, match=r"3 steps in a row overflowed in fp16 .*loss scale now 32.*optimizer\.lr"):
        s.update(True)
    assert NumericsError.exit_code == EXIT_NUMERICS == 6


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_other_formats_are_not_scaled(dtype: str) -> None:
    s = scaler(dtype=dtype, max_skipped_steps=2)  # type: ignore[arg-type]
    assert feed(s, "...xxxxxx...") == [1.0] * 12


@settings(max_examples=60, deadline=None)
@given(st.text(".x", max_size=60), st.text("..x", max_size=60), st.integers(1, 4), st.integers(1, 5))
def test_a_resumed_scaler_goes_on_as_if_nothing_had_happened(
    before: str, after: str, hysteresis: int, window: int
) -> None:
    settings_ = {"loss_scale_hysteresis": hysteresis, "loss_scale_window": window, "max_skipped_steps": 1000}
    one, two = scaler(**settings_), scaler(**settings_)
    feed(one, before)
    two.load(json.loads(json.dumps(one.state())))
    assert two == one
    assert feed(two, after) == feed(one, after)
    assert two.state() == one.state()


def test_state_of_an_unscaled_run_starts_a_scaled_one() -> None:
    """A bf16 checkpoint says scale 1; a checkpoint that says nothing leaves the configured start."""
    s = scaler()
    s.load({})
    assert (s.scale, s.good_steps, s.hysteresis_left, s.skipped_in_a_row) == (1024.0, 0, 1, 0)


def test_torchs_rule_agrees() -> None:
    """torch.amp.GradScaler's update (growth and backoff, no hysteresis), over a long made-up history."""
    generator = torch.Generator().manual_seed(0)
    ours = scaler(loss_scale_window=7, initial_loss_scale=2.0**16, min_loss_scale=2.0**-120)
    scale, good = torch.tensor(2.0**16), torch.tensor(0, dtype=torch.int32)
    for step in range(300):
        overflow = float(torch.rand((), generator=generator)) < 0.1
        ours.update(overflow)
        torch._amp_update_scale_(scale, good, torch.tensor(float(overflow)), 2.0, 0.5, 7)
        assert ours.scale == float(scale), step
