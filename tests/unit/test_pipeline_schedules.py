"""Schedules as data: no deadlock, every pass once, the memory and the bubble that the papers state."""

from __future__ import annotations

from fractions import Fraction

import pytest

from megatron_port.pipeline import schedules
from megatron_port.pipeline.schedules import (
    SCHEDULES,
    Action,
    Kind,
    bubble_fraction,
    gpipe,
    one_f_one_b,
    peak_in_flight,
    simulate,
)

F, B = Kind.FORWARD, Kind.BACKWARD
CASES = [(p, m) for p in range(1, 9) for m in range(1, 17)]


def test_both_schedules_are_offered() -> None:
    assert list(SCHEDULES.items()) == [("gpipe", gpipe), ("1f1b", one_f_one_b)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_pass_once_and_forward_before_backward(name: str) -> None:
    for p, m in CASES:
        for stage in range(p):
            plan = SCHEDULES[name](stage, p, m)
            assert sorted(str(a) for a in plan) == sorted(f"{k}{i}" for k in "FB" for i in range(m)), (p, m, stage)
            # Transfers carry no tag: both neighbours must take the micro-batches in the same order.
            for kind in (F, B):
                assert [a.micro_batch for a in plan if a.kind is kind] == list(range(m))
            at = {a: i for i, a in enumerate(plan)}
            assert all(at[Action(F, i)] < at[Action(B, i)] for i in range(m))


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_deadlock_and_dependencies_hold(name: str) -> None:
    for p, m in CASES:
        times = simulate(name, p, m)
        for stage, done in enumerate(times):
            assert len(done) == 2 * m, (p, m)
            spans = sorted(done.values())
            assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:])), "two passes at once on a stage"
            for action, (start, end) in done.items():
                assert end - start == (1.0 if action.kind is F else 2.0)
                before = stage - 1 if action.kind is F else stage + 1
                if 0 <= before < p:
                    assert times[before][action][1] <= start
                if action.kind is B:
                    assert done[Action(F, action.micro_batch)][1] <= start


def test_peak_in_flight() -> None:
    """What 1F1B is for: stage s holds p - s micro-batches, GPipe all of them."""
    for p, m in CASES:
        for stage in range(p):
            assert peak_in_flight(one_f_one_b(stage, p, m)) == min(p - stage, m), (p, m, stage)
            assert peak_in_flight(gpipe(stage, p, m)) == m
    assert peak_in_flight([]) == 0


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("forward,backward", [(1, 1), (1, 2), (3, 5)])
def test_bubble_is_p_minus_1_over_m(name: str, forward: int, backward: int) -> None:
    """Exactly: small integers are exact in floating point."""
    for p, m in CASES:
        idle = bubble_fraction(name, p, m, forward=forward, backward=backward)
        assert Fraction(idle).limit_denominator(1000) == Fraction(p - 1, m), (p, m)
        assert idle == (p - 1) * (forward + backward) / (m * (forward + backward))


def test_one_stage_runs_each_micro_batch_through() -> None:
    assert [str(a) for a in one_f_one_b(0, 1, 3)] == ["F0", "B0", "F1", "B1", "F2", "B2"]


def test_the_textbook_example() -> None:
    """Figure 4 of arXiv 2104.04473, four stages and eight micro-batches."""
    assert " ".join(map(str, one_f_one_b(0, 4, 8))) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"
    assert " ".join(map(str, one_f_one_b(3, 4, 8))) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"


def test_the_simulator_finds_deadlocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A last stage that wants its micro-batches in the other order than the first sends, one that is never sent."""

    def impatient(stage: int, stages: int, micro_batches: int) -> list[Action]:
        # Stage 0 waits for B0 before it starts F1, the last stage wants F1 before it does B0.
        if stage < stages - 1:
            return [Action(k, m) for m in range(micro_batches) for k in (F, B)]
        return gpipe(stage, stages, micro_batches)

    monkeypatch.setitem(schedules.SCHEDULES, "impatient", impatient)
    with pytest.raises(ValueError, match="impatient deadlocks with 2 stages and 2 micro-batches; waiting: .*0: 'B0'"):
        simulate("impatient", 2, 2)
    monkeypatch.setitem(schedules.SCHEDULES, "backwards", lambda s, p, m: gpipe(s, p, m)[::-1])
    with pytest.raises(ValueError, match="before its forward pass"):
        simulate("backwards", 1, 2)
