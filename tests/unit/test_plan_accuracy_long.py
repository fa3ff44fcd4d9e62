"""Published steps with long sequences: what docs/planner.md says of them stays so, and the committed table is
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
    spec = importlib.util.spec_from_file_location("plan_accuracy_long", ROOT / "benchmarks" / "plan_accuracy_long.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["plan_accuracy_long"] = module
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        spec.loader.exec_module(module)
    return module


def test_the_committed_table_is_current_and_what_is_said_of_it_holds(script: ModuleType) -> None:
    found = script.rows(script.read_points())
    assert script.RESULT.read_text() == script.report(found), "run: python benchmarks/plan_accuracy_long.py"
    slower = script.slowdowns(found)
    assert len(slower) == 5 and statistics.mean(abs(s.planned / s.published - 1) for s in slower) < 0.2
    assert all(s.planned * 0.94 < s.published < s.contiguous for s in slower)  # between the two orders
    long = next(r for r in found if r.tflops and r.case.cp > 1)
    assert long.plan.causal_tflops < long.tflops < long.plan.model_tflops  # between the two counts
