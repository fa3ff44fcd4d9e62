"""Steps that were measured on a GPU in the project's own sessions stay planned, seconds and bytes."""

from __future__ import annotations

from benchmarks import plan_own_machine as own


def test_own_steps_are_planned_within_five_percent() -> None:
    found = own.rows()
    assert {r["size"] for r in found} == {"gpt2-124m", "gpt2-xl"}
    assert all(abs(r["time_error"]) < 0.05 for r in found)
    assert all(abs(r["predicted_bytes"] / r["measured_bytes"] - 1) < 0.02 for r in found)
    assert own.page(found) == own.PAGE.read_text(), "run: python -m benchmarks.plan_own_machine"
