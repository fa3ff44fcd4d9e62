"""Published steps of models with experts: what docs/planner.md says of them stays so, and the committed table is
current."""

from __future__ import annotations

import importlib.util
import statistics
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plan_accuracy_moe", ROOT / "benchmarks" / "plan_accuracy_moe.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["plan_accuracy_moe"] = module
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def found(script: ModuleType) -> list:
    return list(script.rows(script.read_points()))


def mean(found: list, program: str) -> float:
    return statistics.mean(abs(r.error) for r in found if r.judged and program in r.program)


def test_errors_are_those_that_are_stated(found: list) -> None:
    assert mean(found, "MCore folding") <= 0.06
    assert mean(found, ", MCore") <= 0.07  # with folding and without
    assert mean(found, "") <= 0.095
    assert sum(r.judged for r in found) >= 75
    deepseek = next(r for r in found if r.source.startswith("DeepSeek-V3 report"))
    assert deepseek.error == pytest.approx(0, abs=0.10)


def test_one_imbalance_explains_all_pairs(script: ModuleType, found: list) -> None:
    """Sequences of 16k to 128k tokens: the seconds that natural balance adds are those of one factor."""
    implied = [pair.implied for pair in script.pairs(found)]
    assert len(implied) == 4 and max(implied) / min(implied) < 1.05
    assert round(statistics.median(implied), 1) == script.NATURAL


def test_folding_gains_as_published(script: ModuleType, found: list) -> None:
    """Experts that tensor parallelism does not divide are faster in every row, most where they are narrow."""
    gains = [(a.measured / b.measured, a.plan.seconds / b.plan.seconds) for a, b in script.gains(found)]
    assert len(gains) >= 15 and all(planned > 1 for _, planned in gains)
    assert all(planned > 1.3 for published, planned in gains if published > 1.4)


def test_the_committed_table_is_current(script: ModuleType, found: list) -> None:
    assert script.RESULT.read_text() == script.report(found), "run: python benchmarks/plan_accuracy_moe.py"
