"""Why the best layout is better, that suggestions are not slower, and which hardware is nonsense."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_port.core.config.loader import load
from megatron_port.tools.plan.case import Machine, case_of, machine_of, machine_problems
from megatron_port.tools.plan.layer import start_seconds
from megatron_port.tools.plan.rates import Rates
from megatron_port.tools.plan.search import layouts, options_of
from megatron_port.tools.plan.step import _kinds, plan_step
from megatron_port.tools.plan.text import make_plan


def test_the_gains_lead_from_the_run_to_the_best() -> None:
    plan = make_plan(load("runs/frontier-22b", ["cluster.nodes=4"]).config)
    assert plan.best is not None and plan.best.step.seconds < plan.step.seconds
    assert plan.gains[-1].seconds == pytest.approx(plan.best.step.seconds, rel=1e-6)
    saved = sum(sum(gain.saved.values()) for gain in plan.gains)
    assert saved == pytest.approx(plan.step.seconds - plan.best.step.seconds, rel=1e-6)
    assert all(c.step.seconds < plan.step.seconds for c in plan.neighbours)


def test_a_pass_takes_no_less_than_the_host_to_start_it() -> None:
    """A narrow model divided eight ways: the device waits, but not under graphs, and not with a host without cost."""
    config = load("runs/frontier-22b", ["cluster.nodes=1", "model.hidden_size=1024", "model.num_attention_heads=16",
                                        "layout.tensor_parallel_size=8", "layout.pipeline_parallel_size=1",
                                        "activations.policy=none"]).config
    (case, _), machine = case_of(config, allow_fractions=True), machine_of(config)
    slow = replace(machine, hardware=replace(machine.hardware, host_us=500.0))
    bound = plan_step(case, slow)
    starts = sum(start_seconds(case, _kinds(case)[0], Rates.of(slow)))
    least = case.model.num_layers * case.micro_batches * starts
    assert bound.split.host > 0 and bound.seconds >= least
    graphed = replace(case, engine=replace(case.engine, graphed=True))
    free = replace(machine, hardware=replace(machine.hardware, host_us=0.0))
    assert plan_step(graphed, slow).seconds == pytest.approx(plan_step(case, free).seconds)


def test_zero_stages_are_one_without_replicas() -> None:
    config = load("runs/frontier-22b", ["cluster.nodes=1", "engine=native"]).config
    case, _ = case_of(config, allow_fractions=True)
    options = replace(options_of(config, case), zero=(0, 1, 2))
    found = list(layouts(case, options))
    assert any(c.dp == 1 for c in found) and any(c.dp > 1 for c in found)
    assert {c.zero_stage for c in found if c.dp * c.cp == 1} == {0}
    assert {c.zero_stage for c in found if c.dp * c.cp > 1} == {0, 1, 2}


@pytest.mark.parametrize("field, value, word", [
    ("node_gb", -1.0, "at least 0"), ("launch_us", float("nan"), "at least 0"),
    ("launch_us", 1e9, "no device has more"), ("memory_bandwidth_gb", 1e9, "no device has more"),
    ("nic_gb", 0.0, "bandwidth of an adapter"),
    ("fp8_matmul_tflops", 5000.0, "above hardware.fp8_peak"),
])
def test_nonsense_hardware_is_refused(field: str, value: float, word: str) -> None:
    machine = machine_of(load("clusters/dgx-h100").config)
    assert not machine_problems(machine)
    changes: dict[str, Any] = {field: value}
    broken: Machine = replace(machine, hardware=replace(machine.hardware, **changes))
    assert any(word in problem for problem in machine_problems(broken))
