"""Schedules as data: no deadlock, every pass once, the memory and the bubble that the papers state."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_port.core.dist.mesh import Topology
from megatron_port.core.pipeline.schedules import (
    Action,
    Kind,
    Schedule,
    forward_only,
    gpipe,
    interleaved,
    make_schedule,
    one_f_one_b,
)
from megatron_port.ext.pipeline.checks import check, check_messages, check_passes, held_bound, peak_in_flight
from megatron_port.tools.plan.simulate import bubble_fraction, simulate, unit_cost

F = Kind.FORWARD
KINDS = [("gpipe", 1), ("1f1b", 1), ("1f1b", 2), ("1f1b", 3), ("zb-h1", 1), ("zb-v", 2)]
"""(schedule, chunks a stage)"""
sizes = given(st.integers(1, 9), st.integers(1, 20), st.sampled_from(KINDS))


@sizes
@settings(max_examples=150, deadline=None)
def test_every_schedule_is_right(p: int, m: int, kind: tuple[str, int]) -> None:
    """Passes, messages without a buffer, memory; also where the stages do not divide the micro-batches."""
    name, v = kind
    check(make_schedule(name, p, m, v))


@sizes
@settings(max_examples=60, deadline=None)
def test_an_evaluation_is_too(p: int, m: int, kind: tuple[str, int]) -> None:
    schedule = forward_only(make_schedule(kind[0], p, m, kind[1]).grid, m)
    check_messages(schedule)
    assert all(sorted(map(str, plan)) == sorted(str(Action(F, i, c)) for i in range(m) for c in range(kind[1]))
               for plan in schedule.plans)


@sizes
@settings(max_examples=60, deadline=None)
def test_what_a_pass_needs_ends_before_it_starts(p: int, m: int, kind: tuple[str, int]) -> None:
    name, v = kind
    schedule = make_schedule(name, p, m, v)
    times = simulate(schedule, unit_cost(3.0, 5.0))
    ends = [{span.action: span.end for span in stage} for stage in times]
    for stage, spans in enumerate(times):
        assert all(a.end <= b.start for a, b in zip(spans, spans[1:])), "two passes at once on a stage"
        for span in spans:
            assert span.end - span.start == {"F": 3.0, "B": 5.0, "I": 2.5, "W": 2.5}[span.action.kind.value]
            before = schedule.before(stage, span.action)
            if before is not None:
                assert ends[before[0]][before[1]] <= span.start
                assert schedule.after(*before) == (stage, span.action)


def test_peak_in_flight() -> None:
    """What 1F1B is for: stage s holds p - s micro-batches, GPipe all of them; the others as their papers say."""
    for p in range(1, 7):
        for m in range(1, 13):
            for stage in range(p):
                assert peak_in_flight(one_f_one_b(stage, p, m)) == min(p - stage, m), (p, m, stage)
                assert peak_in_flight(gpipe(stage, p, m)) == m
                for name, v in KINDS:
                    schedule = make_schedule(name, p, m, v)
                    bound, peak = held_bound(schedule, stage), peak_in_flight(schedule.plans[stage])
                    assert peak == bound if m % p == 0 else peak <= bound, (name, p, m, v, stage)
    assert peak_in_flight([]) == 0


@pytest.mark.parametrize("name,chunks", [("gpipe", 1), ("1f1b", 1), ("1f1b", 2), ("1f1b", 4)])
@pytest.mark.parametrize("forward,backward", [(1, 1), (1, 2), (3, 5)])
def test_bubble_is_p_minus_1_over_m_v(name: str, chunks: int, forward: int, backward: int) -> None:
    """Exactly: small integers are exact in floating point. Interleaved: m divisible by p."""
    for p in range(1, 9):
        for m in range(1, 17) if chunks == 1 else range(p, 4 * p + 1, p):
            idle = bubble_fraction(make_schedule(name, p, m, chunks), forward=forward, backward=backward)
            assert Fraction(idle).limit_denominator(1000) == Fraction(p - 1, m * chunks), (p, m)


@pytest.mark.parametrize("name,chunks", [("zb-h1", 1), ("zb-v", 2)])
def test_zero_bubble_is_as_short_as_it_says(name: str, chunks: int) -> None:
    """At F = I = W: the last stage cannot start before tick p - 1, and then every stage works without a pause."""
    for p in range(2, 10):
        for m in range(p, 4 * p + 2):
            schedule = make_schedule(name, p, m, chunks)
            more = max(stage[-1].end for stage in simulate(schedule)) - (3 * m * chunks + p - 1)
            least = name == "zb-h1" or p <= 4 or (p == 8 and m >= 2 * p)
            assert more == 0 if least else 0 <= more <= p // 2 + 1, (p, m, more)
            if not more:
                assert bubble_fraction(schedule) == pytest.approx((p - 1) / (3 * m * chunks))


def test_one_stage_runs_each_micro_batch_through() -> None:
    assert [str(a) for a in one_f_one_b(0, 1, 3)] == ["F0", "B0", "F1", "B1", "F2", "B2"]


def test_the_textbook_examples() -> None:
    """Figure 4 of arXiv 2104.04473: four stages and eight micro-batches, one chunk and two. ZB-H1: 1F1B's warm-up."""
    assert " ".join(map(str, one_f_one_b(0, 4, 8))) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"
    assert " ".join(map(str, one_f_one_b(3, 4, 8))) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"
    last = " ".join(map(str, interleaved(3, 4, 2, 8)[:16]))
    assert last == "F0 F1 F2 F3 F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3.1 B3.1 F4 B0 F5 B1"
    assert " ".join(map(str, make_schedule("zb-h1", 4, 6).plans[3][:9])) == "F0 I0 F1 I1 F2 I2 F3 I3 W0"
    assert " ".join(map(str, make_schedule("zb-h1", 4, 6).plans[0][:8])) == "F0 F1 F2 F3 I0 W0 F4 I1"


def test_the_first_and_the_last_chunk_of_a_folded_pipeline_are_on_one_stage() -> None:
    grid = make_schedule("zb-v", 4, 4, 2).grid
    assert [grid.virtual_stage(s, c) for c in range(2) for s in range(4)] == [0, 1, 2, 3, 7, 6, 5, 4]
    assert all(grid.virtual_stage(*grid.holder(x)) == x for x in range(8)) and grid.last_stage == 0


def _broken(*plans: str) -> Schedule:
    kinds = {k.value: k for k in Kind}
    parsed = tuple(tuple(Action(kinds[w[0]], int(w[1:])) for w in plan.split()) for plan in plans)
    return Schedule("broken", Topology(pp=len(plans)), 2, parsed)


def test_mistakes_are_found() -> None:
    """A deadlock, a backward pass too early, one that is missing, one that is there twice."""
    with pytest.raises(ValueError, match="broken deadlocks with 2 stages and 2 micro-batches; waiting: .*0: 'B0'"):
        simulate(_broken("F0 B0 F1 B1", "F0 F1 B0 B1"))
    with pytest.raises(ValueError, match="before its forward pass"):
        simulate(_broken("B0 F0 F1 B1"))
    with pytest.raises(ValueError, match="stage 0: B0 comes before its forward pass"):
        check_passes(_broken("B0 F0 F1 B1"))
    for plan in ("F0 B0 F1", "F0 F0 B0 F1 B1", "F0 B0 F1 B1 W1"):
        with pytest.raises(ValueError, match="is not there once"):
            check_passes(_broken(plan))
    good = make_schedule("1f1b", 3, 6)
    hungry = replace(good, plans=make_schedule("gpipe", 3, 6).plans)
    with pytest.raises(ValueError, match="stage 0 holds 6 micro-batches, more than 3"):
        check(hungry)
    with pytest.raises(ValueError, match="no schedule 'zb-h1' with 2 chunks"):
        make_schedule("zb-h1", 2, 2, 2)


def test_sends_in_another_order_than_receives_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the one order of all messages the queues of interleaved stages block one another."""
    from megatron_port.core.pipeline import schedules as messages

    schedule = make_schedule("1f1b", 4, 8, 2)
    real = messages._ordered(schedule)
    turned = tuple(tuple(reversed(m)) if s == 2 else m for s, m in enumerate(real))
    monkeypatch.setattr(messages, "_ordered", lambda schedule: turned)
    messages.turns.cache_clear()
    try:
        with pytest.raises(ValueError, match="deadlocks|must follow"):
            check_messages(schedule)
    finally:
        messages.turns.cache_clear()
