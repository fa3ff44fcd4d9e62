"""The tables of docs/parity.md are the constants that runs are judged by; the judge passes over nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_port.core.config.schema import ModelConfig, RunConfig
from megatron_port.tools.parity.comparison import (
    DISTANCE,
    FIRST_STEP,
    FP32,
    FP64,
    NOISE_FACTOR,
    ROUNDOFF,
    SPREAD_FACTOR,
    Run,
    compare,
    distances,
    first_step,
)
from megatron_port.tools.parity.emulation import SingleRuns, within_rounding

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "parity.md").read_text(encoding="utf-8")
MODEL = ModelConfig(num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=7, seq_length=4)


def row(start: str) -> list[str]:
    """Cells of the table's row after the first."""
    (line,) = re.findall(rf"^\| {re.escape(start)}.*", TEXT, re.MULTILINE)
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_the_documented_bounds_are_those_in_use() -> None:
    for start, bounds in {"fp64": FP64, "fp32 |": FP32}.items():
        found = [float(x) for x in row(start)[:4]]
        assert found == [bounds.loss, bounds.grad_norm, bounds.gradient, bounds.key_bias]
    assert row("fp64")[4] == f"{FP64.weight:.0e} × learning rate".replace("e-0", "e-")
    for dtype, roundoff in ROUNDOFF.items():
        loss, norm, gradient, key, _ = row(f"{dtype}: first step")
        bounds = FIRST_STEP[dtype]
        assert [float(x) for x in (loss, norm, gradient)] == [bounds.loss, bounds.grad_norm, bounds.gradient]
        assert float(key.removesuffix(" u")) * roundoff == bounds.key_bias
        assert roundoff == torch.finfo({"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]).eps / 2
    assert row("bf16, fp16: all steps")[:4] == [f"{SPREAD_FACTOR:g} × spread"] * 4
    assert [float(x) for x in row("bound")] == [
        DISTANCE.loss, DISTANCE.grad_norm, DISTANCE.gradient, DISTANCE.scale]


def _run(losses: tuple[float, ...], norms: tuple[float | None, ...], gradient: float = 1.0) -> Run:
    return Run(losses, norms, None, None, ({"a": torch.full((4,), gradient, dtype=torch.float64)},), {}, ())


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_loss_that_is_no_number_differs(step: int) -> None:
    """At any step: ``max`` passes over a NaN that does not come first."""
    losses = tuple(float("nan") if i == step else 1.0 for i in range(3))
    found = compare(_run((1.0,) * 3, (1.0,) * 3), _run(losses, (1.0,) * 3), FP32, MODEL)
    assert [(d.quantity, d.where) for d in found if not d.ok] == [("loss", f"step {step}")]
    with pytest.raises(ValueError, match="shorter"):
        compare(_run((1.0,) * 3, (1.0,) * 3), _run((1.0,) * 2, (1.0,) * 2), FP32, MODEL)


def test_the_first_step_is_the_first_that_is_not_skipped() -> None:
    run = _run((1.0, 1.0, 0.9, 0.8), (None, None, 3.0, 2.0))
    assert first_step(run).losses == (1.0, 1.0, 0.9) and first_step(run).grad_norms == (None, None, 3.0)
    other = replace(run, gradients=_run((), (), 1.1).gradients)
    (gradient,) = [d for d in compare(run, other, FP32, MODEL) if not d.ok]
    assert gradient.where == "step 2, a" and gradient.value == pytest.approx(0.1, rel=1e-2)


def test_a_distance_tells_a_factor_from_noise() -> None:
    """4 % of a gradient: as a factor over the bound of bf16, as noise not."""
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(10_000, generator=generator, dtype=torch.float64)
    noise = 0.04 * torch.randn(10_000, generator=generator, dtype=torch.float64)
    one = replace(_run((1.0,), (1.0,)), gradients=({"a": gradient},))
    for other, scale in ((gradient + noise, False), (gradient * 1.04, True)):
        found = distances(
            one, replace(one, gradients=({"a": other},)), "bf16", MODEL, rule="", noise=lambda: (one, [one, one])
        )
        assert {d.quantity for d in found if not d.ok} == ({"grad scale"} if scale else set())
        assert next(d for d in found if d.quantity == "grad moved").value == pytest.approx(0.04, rel=0.05)


@pytest.mark.parametrize(("moved", "typical", "ok"), [(0.3, 0.11, True), (0.3, 0.09, False), (0.03, None, True)])
def test_random_errors_are_the_unit_of_what_moves_far(moved: float, typical: float | None, ok: bool) -> None:
    """They are not even asked for where nothing is far; and they never make a bound smaller."""
    exact = _run((1.0,), (1.0,))

    def noise() -> tuple[Run, list[Run]]:
        assert typical is not None
        return exact, [replace(exact, gradients=_run((), (), 1 + typical).gradients)] * 2

    other = replace(exact, gradients=_run((), (), 1 + moved).gradients)
    found = distances(exact, other, "bf16", MODEL, rule="", noise=noise)
    assert all(d.ok for d in found) is ok and [d.quantity for d in found][:2] == ["loss moved", "norm moved"]
    gradient = next(d for d in found if d.quantity == "grad moved")
    u = ROUNDOFF["bf16"] * (1 + MODEL.num_layers / 16) ** 0.5
    assert gradient.bound == pytest.approx(max(DISTANCE.gradient * u, NOISE_FACTOR * (typical or 0.0)), rel=2e-3)


@pytest.mark.parametrize(("placement", "moved", "ok"), [
    ("pre", 0.02, False), ("post", 0.02, True), ("post", 0.3, False), ("sandwich", 0.3, False),
])
def test_normed_branches_outside_the_first_steps_bounds_are_held_to_distances(
    placement: str, moved: float, ok: bool
) -> None:
    """Of the layout itself, from fp32, within the noise; a wide spread of orders alone lets nothing pass."""
    run = RunConfig(model=replace(MODEL, norm_placement=placement))  # type: ignore[arg-type]
    run = replace(run, precision=replace(run.precision, dtype="bf16"))
    exact = _run((1.0,), (1.0,))

    def off(by: float) -> Run:
        return replace(exact, gradients=_run((), (), 1 + by).gradients)

    runs = SingleRuns(
        rounding_there=exact, ordered=lambda count: [exact, off(0.2)], plain=lambda: exact, fp32=lambda: exact,
        noisy=lambda: [off(0.005)] * 2,
    )
    found = within_rounding(run, off(moved), runs)
    assert all(d.ok for d in found) is ok
    assert any(d.rule.startswith("the layout") for d in found) is (placement != "pre")
