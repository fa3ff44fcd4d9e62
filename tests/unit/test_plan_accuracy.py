"""Published steps: what docs/planner.md says of the planner's accuracy stays so, and the committed table is current."""

from __future__ import annotations

import importlib.util
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plan_accuracy", ROOT / "benchmarks" / "plan_accuracy.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["plan_accuracy"] = module
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def found(script: ModuleType) -> list:
    return list(script.rows(script.read_points()))


def errors(found: list, source: str = "") -> list[float]:
    return [
        r.plan.seconds / r.measured - 1 for r in found
        if r.measured and not r.calibration and r.source.startswith(source)
    ]


def test_mean_error_over_all_rows(found: list) -> None:
    every = errors(found)
    assert len(every) == 86  # 16 more are set aside
    assert statistics.mean(map(abs, every)) <= 0.055
    assert sum(abs(e) > 0.25 for e in every) <= 3  # three of vTrain's; named in evidence/planner-accuracy.md


def test_what_contradicts_other_rows_of_its_layout(script: ModuleType, found: list) -> None:
    """By published seconds alone, so a plan can neither make nor mend it; the others meet the goal of 5 %."""
    unlike = script.contradicted(found)
    assert {line: round(ratio, 2) for line, ratio in unlike.items()} == {66: 1.39, 67: 1.96, 79: 1.31, 81: 1.23}
    rest = [r for r in found if r.measured and not r.calibration and r.line not in unlike]
    assert statistics.mean(abs(r.plan.seconds / r.measured - 1) for r in rest) <= 0.05
    doubled = [replace(r, measured=2 * r.measured) if r.line == 88 else r for r in found]  # another row of its layout
    assert 88 in script.contradicted(doubled)


def test_korthikantis_rows(found: list) -> None:
    six = errors(found, "Korthikanti")  # of eight; two are set aside
    assert len(six) == 6 and statistics.mean(map(abs, six)) <= 0.05


def test_every_row_that_ran_fits(script: ModuleType, found: list) -> None:
    unfit = [r.line for r in found if script.fullest(r.case, r.machine).total > r.machine.cluster.memory_gb * 1e9]
    assert not unfit


def test_frontier_from_22b_alone(found: list) -> None:
    rates = {r.line: r.plan.hardware_tflops for r in found if r.source == "Dash"}
    assert rates[2] == pytest.approx(73.5, rel=0.002)  # the calibration itself
    assert 69.2 / rates[3] - 1 == pytest.approx(0, abs=0.07)
    assert 61.2 / rates[4] - 1 == pytest.approx(0, abs=0.07)


def test_the_calibration_is_the_scripts(script: ModuleType, found: list) -> None:
    machine = next(r.machine for r in found if r.source == "Dash")
    assert machine.calibration.matmul_scale == pytest.approx(script.calibrate("frontier"), abs=0.001)


def test_the_committed_table_is_current(script: ModuleType, found: list) -> None:
    assert script.RESULT.read_text() == script.report(found), "run: python benchmarks/plan_accuracy.py"
