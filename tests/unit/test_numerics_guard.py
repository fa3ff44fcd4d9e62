"""Limits from running medians, the verdict on a step, samples left out of the order."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_port.core.config.checks import problems
from megatron_port.core.config.schema import (
    DataConfig,
    ModelConfig,
    NumericsConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
)
from megatron_port.core.engine.api import NO_LIMITS, StepLimits, StepResult
from megatron_port.core.optim.gradients import LossScaler
from megatron_port.ext.health.anomaly import _culprit, chosen_micro_batch, same_bits
from megatron_port.ext.health.numerics import LeftOut, NumericsGuard, position
from megatron_port.ext.health.probe import Probe, StepDiagnostics, trace_diagnostics


def guard(*, dtype: Literal["bf16", "fp16"] = "bf16", clip: float = 1.0, **numerics: Any) -> NumericsGuard:
    return NumericsGuard(RunConfig(
        numerics=NumericsConfig(**numerics), precision=PrecisionConfig(dtype=dtype),
        optimizer=OptimizerConfig(clip_grad=clip),
    ))


def step(loss: float = 4.0, grad_norm: float | None = 2.0, *, skipped: bool = False) -> StepResult:
    return StepResult(loss=loss, tokens=1, grad_norm=grad_norm, skipped=skipped)


def test_medians_begin_when_half_the_window_is_known() -> None:
    g = guard(window=8, loss_spike=3.0, grad_norm_spike=10.0)
    chance = 1.25 * math.log(g.config.model.vocab_size)
    assert g.limits() == NO_LIMITS  # the first loss may be anything
    for _ in range(3):
        g.accept(step())
        assert g.limits() == StepLimits(loss=pytest.approx(chance))  # type: ignore[arg-type]
    g.accept(step(loss=5.0, grad_norm=2.0))
    assert g.limits() == StepLimits(loss=12.0, grad_norm=20.0)


def test_before_that_the_largest_of_eight_steps_stands_for_the_median() -> None:
    g = guard(window=64, loss_spike=3.0, grad_norm_spike=10.0)
    for n in range(7):
        g.accept(step(loss=2.0, grad_norm=1.0 + n))
        assert g.limits().grad_norm == math.inf
    g.accept(step(loss=2.5, grad_norm=2.0))
    assert g.limits() == StepLimits(loss=7.5, grad_norm=70.0)


def test_a_start_above_chance_raises_the_limit_and_survives_a_checkpoint() -> None:
    g = guard()
    g.accept(step(loss=30.0))
    g.accept(step(loss=20.0))
    assert g.limits().loss == pytest.approx(37.5)
    other, old = guard(), guard()
    other.load(g.state())
    old.load({"losses": [4.0, 12.0]})  # a checkpoint of a version that did not keep the first loss
    assert other.limits().loss == pytest.approx(37.5) and old.limits().loss == pytest.approx(15.0)


CURVES = {
    # Loss and gradient norm of runs/quickstart, one process, as they were recorded; lr 4e-3 is a rate that is too high.
    "lr 4e-3": (14, [
        5.56, 5.23, 5.01, 4.86, 4.74, 4.57, 4.4, 4.1, 3.94, 3.68, 3.65, 3.43, 3.34, 9.4, 3.4, 3.97, 3.52, 3.4,
    ], [5.9, 3.76, 2.42, 2.44, 2.33, 2.17, 1.9, 2.27, 2.27, 1.94, 3.81, 1.01, 0.94, 12.45, 1.93, 19.77, 1.38, 3.24]),
    "lr 2e-3, a gradient 40 times the usual": (0, [
        5.56, 5.35, 5.13, 4.97, 4.89, 4.81, 4.74, 4.56, 4.42, 4.22, 4.21, 3.92, 3.8, 3.67, 4.42, 3.38, 3.36, 3.23,
    ], [5.9, 4.83, 2.9, 2.51, 2.38, 2.3, 2.12, 2.26, 2.13, 2.09, 12.34, 2.04, 1.76, 1.63, 61.4, 1.56, 1.25, 1.2]),
    "lr 1e-3, warm-up": (0, [
        5.56, 5.45, 5.27, 5.09, 5.0, 4.94, 4.91, 4.8, 4.74, 4.64, 4.56, 4.43, 4.33, 4.22, 4.08, 3.95, 3.86, 3.74,
    ], [5.9, 5.51, 4.09, 2.94, 2.5, 2.35, 2.19, 2.39, 2.32, 2.32, 2.21, 2.2, 2.04, 2.1, 2.67, 2.03, 1.73, 2.03]),
    "lr 1e-3, no warm-up": (0, [
        5.56, 5.07, 4.88, 4.71, 4.59, 4.44, 4.44, 4.16, 4.07, 3.93, 3.86, 3.73, 3.66, 3.59, 3.47, 3.39, 3.37, 3.28,
    ], [5.9, 2.99, 2.3, 2.36, 2.25, 2.12, 17.14, 2.03, 1.9, 1.92, 1.78, 1.98, 1.51, 1.32, 1.61, 1.19, 1.13, 1.12]),
    "lr 2e-3, longer warm-up": (0, [
        5.56, 5.44, 5.27, 5.09, 5.0, 4.94, 4.91, 4.79, 4.73, 4.62, 4.55, 4.41, 4.3, 4.2, 4.05, 3.91, 3.83,
        3.69, 3.6, 3.48, 3.37, 3.32, 3.24, 3.14,
    ], [
        5.9, 5.49, 4.02, 2.9, 2.48, 2.34, 2.19, 2.39, 2.31, 2.31, 2.2, 2.19, 2.03, 2.42, 2.35, 1.93, 1.83,
        1.67, 1.5, 1.9, 1.41, 1.03, 1.33, 0.99,
    ]),
    "one sample per step": (0, [
        5.55, 5.51, 5.39, 5.24, 4.96, 4.98, 4.89, 4.81, 4.76, 4.65, 4.59, 4.61, 4.35, 4.35, 4.43, 4.09, 4.24,
        3.75, 3.72, 4.01, 3.77, 3.38, 4.16, 3.34, 3.58, 3.3, 3.19, 3.24, 3.57, 3.2,
    ], [
        6.6, 7.72, 5.38, 4.25, 3.84, 3.09, 3.13, 2.87, 2.8, 2.92, 2.58, 2.44, 2.62, 2.25, 1.91, 2.09, 1.74,
        2.31, 1.96, 1.45, 1.27, 1.72, 67.15, 1.47, 1.09, 1.29, 1.14, 1.33, 35.48, 4.98,
    ]),
}


@pytest.mark.parametrize("name", CURVES)
def test_the_start_of_recorded_runs(name: str) -> None:
    """The one that diverges is called at that step; none of the others is."""
    bad, losses, norms = CURVES[name]
    g = NumericsGuard(RunConfig(model=ModelConfig(vocab_size=257)))
    called = []
    for number, (loss, norm) in enumerate(zip(losses, norms, strict=True), 1):
        result = step(loss=loss, grad_norm=norm)
        if g.judge(result, g.limits()):
            called.append(number)
        else:
            g.accept(result)
    assert called == ([bad] if bad else [])


def test_anomalies_in_a_row_are_counted() -> None:
    g = guard()
    for at in (3, 7, 8, 9):
        g.count_anomaly(at)
    assert g.steps_in_a_row == 3 and guard().steps_in_a_row == 0


def test_the_median_shrugs_off_an_outlier_and_forgets() -> None:
    g = guard(window=4, loss_spike=2.0)
    for loss in (4.0, 4.0, 4.0, 1000.0):
        g.accept(step(loss=loss))
    assert g.limits().loss == 8.0
    for _ in range(4):
        g.accept(step(loss=2.0))
    assert g.limits().loss == 4.0


def test_a_step_without_a_loss_token_is_no_loss_of_zero() -> None:
    g = guard(window=4, loss_spike=3.0, grad_norm_spike=10.0)
    empty = StepResult(loss=0.0, tokens=0, grad_norm=0.0)
    for result in (step(), empty, empty, step()):
        assert g.judge(result, g.limits()) == ""
        g.accept(result)
    assert g.limits() == StepLimits(loss=12.0, grad_norm=20.0)


def test_small_numbers_are_no_spikes() -> None:
    g = guard(window=2, loss_spike=3.0, grad_norm_spike=3.0, clip=1.0)
    g.accept(step(loss=1e-3, grad_norm=1e-4))
    assert g.limits() == StepLimits(loss=1.0, grad_norm=1.0)
    without_clip = guard(window=2, grad_norm_spike=3.0, clip=0.0)
    without_clip.accept(step(grad_norm=1e-4))
    assert without_clip.limits().grad_norm == pytest.approx(3e-4)


def test_zero_switches_a_spike_off() -> None:
    g = guard(window=2, loss_spike=0.0, grad_norm_spike=0.0)
    g.accept(step())
    assert g.limits() == NO_LIMITS


def test_verdicts() -> None:
    g, limits = guard(), StepLimits(loss=10.0, grad_norm=5.0)
    assert g.judge(step(), limits) == ""
    assert g.judge(step(loss=10.0, grad_norm=5.0), limits) == ""
    assert "loss is nan" in g.judge(step(loss=math.nan, grad_norm=None), limits)
    assert "loss is inf" in g.judge(step(loss=math.inf), limits)
    assert "loss 11 is above its limit 10" in g.judge(step(loss=11.0), limits)
    assert "gradient norm 6 is above its limit 5" in g.judge(step(grad_norm=6.0), limits)
    assert "gradient is not finite" in g.judge(step(grad_norm=None, skipped=True), limits)


def test_fp16_overflow_is_a_normal_skip() -> None:
    g = guard(dtype="fp16", window=2)
    assert g.judge(step(grad_norm=None, skipped=True), NO_LIMITS) == ""
    g.accept(step(grad_norm=None, skipped=True))
    assert not g.losses and not g.grad_norms
    assert g.judge(step(loss=math.nan, grad_norm=None, skipped=True), NO_LIMITS)


def test_the_loss_scale_learns_from_overflow_only() -> None:
    scaler = LossScaler(PrecisionConfig(dtype="fp16", initial_loss_scale=64.0, loss_scale_hysteresis=1))
    scaler.account(math.nan, math.nan, applied=False)
    scaler.account(4.0, 1e9, applied=False)
    assert scaler.state() == LossScaler(scaler.config).state()
    scaler.account(4.0, math.inf, applied=False)
    assert scaler.scale == 32.0 and scaler.skipped_in_a_row == 1
    scaler.account(4.0, 1.0, applied=True)
    assert scaler.good_steps == 1 and scaler.skipped_in_a_row == 0


def test_too_many_anomalies_are_counted_within_a_thousand_steps() -> None:
    g = guard(max_anomalies=3)
    assert [g.count_anomaly(s) for s in (1, 500, 1001, 1400)] == [False, False, False, True]
    assert g.anomalies_total == 4


def test_limits_as_finite_numbers_refuse_what_is_not() -> None:
    loss, norm = NO_LIMITS.largest
    assert loss >= 1e300 and norm >= 1e300
    assert not math.inf <= loss and not math.nan <= norm


@settings(max_examples=50)
@given(batch=st.integers(1, 64), bad=st.lists(st.integers(0, 30), max_size=5), steps=st.integers(1, 40))
def test_what_is_left_out_is_never_trained_on_and_nothing_else_is_missed(
    batch: int, bad: list[int], steps: int
) -> None:
    """``bad``: positions (in batches) of the data's order that turn out to be bad, whenever they are met."""
    g = guard()
    done: list[int] = []
    while len(done) < steps:
        at = g.position(len(done) * batch)
        if at // batch in bad:
            g.leave_out(at, batch)
            done = done[: len(done) // 2]  # back to some checkpoint
            continue
        done.append(at)
    assert done == [b * batch for b in range(steps + len(bad)) if b not in bad][:steps]


def test_position_of_nothing_left_out() -> None:
    assert [position(n, ()) for n in (0, 7)] == [0, 7]
    assert [position(n, (LeftOut(8, 8), LeftOut(16, 8))) for n in (0, 8, 16)] == [0, 24, 32]


def test_the_state_comes_back_through_json() -> None:
    g = guard(window=4)
    for loss in (1.1, 2.2, math.pi):
        g.accept(step(loss=loss, grad_norm=loss / 3))
    g.count_anomaly(7)
    g.leave_out(24, 8)
    other = guard(window=4)
    other.load(json.loads(json.dumps(g.state())))
    assert other.state() == g.state() and other.limits() == g.limits()
    g.count_anomaly(9)
    g.load({"losses": [5.0]}, medians_only=True)
    assert list(g.losses) == [5.0] and g.anomaly_steps == [7, 9] and g.left_out == [LeftOut(24, 8)]
    other.load({})
    assert other.state() == guard(window=4).state()


def test_settings_are_checked() -> None:
    good = RunConfig(data=DataConfig(synthetic=True))
    assert not problems(good)
    for change, text in (
        ({"on_anomaly": "ignore"}, "on_anomaly 'ignore' is unknown"), ({"loss_spike": 0.5}, "0 (off) or above 1"),
        ({"window": 1}, "numerics.window is 1"), ({"max_anomalies": 0}, "max_anomalies is 0"),
    ):
        assert any(text in p for p in problems(replace(good, numerics=NumericsConfig(**change)))), change
    megatron = replace(good, data=DataConfig(synthetic=True, order="megatron"))
    assert any("rewind" in p for p in problems(replace(megatron, numerics=NumericsConfig(on_anomaly="rewind"))))


# ---------------------------------------------------------------- what a finding says


def test_bits_are_compared_with_nan_equal_to_itself() -> None:
    nan = step(loss=math.nan, grad_norm=None)
    assert same_bits(nan, step(loss=-math.nan, grad_norm=None)) and not same_bits(nan, step(grad_norm=None))
    assert not same_bits(step(loss=0.0), step(loss=-0.0)) and same_bits(step(), step())
    assert not same_bits(step(grad_norm=1.0), step(grad_norm=1.0 + 2**-52))


def test_nobody_is_named_where_nobody_saw_anything() -> None:
    nothing = StepDiagnostics()
    assert [_culprit(nothing, by, 3, None) for by in ("finite", "loss", "norm")] == [None] * 3
    assert _culprit(StepDiagnostics(losses=[1.0, 2.0]), "loss", 3, None) == 3
    assert _culprit(StepDiagnostics(gradient_norm=0.5), "norm", 3, None) == 3
    assert _culprit(StepDiagnostics(order=5), "finite", 3, None) == 3


def test_what_a_step_leaves_behind() -> None:
    bad = trace_diagnostics([torch.tensor(1.0), torch.tensor(math.inf)], ["w"], stage=0)
    assert (bad.micro_batch, bad.phase, chosen_micro_batch(bad)) == (1, "loss", 1)
    summed = trace_diagnostics([torch.tensor(1.0)], ["w"], stage=1)
    assert summed.phase == "sum" and chosen_micro_batch(summed) is None
    # Backward begins at the last stage, and any loss says more.
    assert bad.order < summed.order < trace_diagnostics([], ["w"], stage=0).order
    finite = trace_diagnostics([torch.tensor(1.0), torch.tensor(3.0), torch.tensor(2.0)], [], stage=0)
    assert finite.phase == "" and chosen_micro_batch(finite) == 1


def test_the_order_of_findings() -> None:
    """Micro-batch first, then forward before backward, then the stage that computes first."""

    def order(m: int, *, stage: int, bad_forward: bool) -> int:
        probe, layer = Probe(stage=stage, stages=3), torch.nn.Linear(2, 2)
        if bad_forward:
            with probe.watch(layer), probe.forward(m):
                layer(torch.full((1, 2), math.nan))
        else:
            probe.after_backward(m, [torch.tensor([math.nan])])
        return probe.diagnostics(m + 1).order

    ways = [order(m, stage=s, bad_forward=f) for m in (0, 1) for f, stages in ((True, (0, 1, 2)), (False, (2, 1, 0)))
            for s in stages]
    assert ways == sorted(ways) and len(set(ways)) == 12
    assert Probe(stage=0, stages=1).diagnostics(4).micro_batch is None
