"""Weight passes that fill exchanges of rows: the order of passes, their time and memory, which products run when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_port.core.config.loader import load
from megatron_port.core.layers.linear import WgradAccumulator
from megatron_port.core.pipeline.schedules import Action, Kind, Schedule, fillers, make_schedule
from megatron_port.ext.pipeline.checks import check, check_passes, peak_in_flight
from megatron_port.ext.pipeline.zero_bubble import filled
from megatron_port.tools.plan.case import case_of
from megatron_port.tools.plan.page import _beside
from megatron_port.tools.plan.simulate import simulate
from megatron_port.tools.plan.step import Exchanges, replay, timeline

F, W = Kind.FORWARD, Kind.WEIGHT


def length(schedule: Schedule, exchange: float) -> float:
    """Time of a step whose passes take 1 each, forward passes and those of inputs ``exchange`` more for rows."""
    def cost(virtual: int, action: Action) -> float:
        return 1.0 if action.kind is W else 1.0 + exchange

    stages = simulate(schedule, cost, exchanges=[exchange] * schedule.grid.virtual_stages)
    return max(stage[-1].end for stage in stages)


@given(st.integers(1, 9), st.integers(1, 20))
@settings(max_examples=30, deadline=None)
def test_filled_schedules_are_right(p: int, m: int) -> None:
    """Every pass once, no deadlock, one micro-batch more at most; and gradients are added in the order of before."""
    schedule, plain = (make_schedule("zb-h1", p, m, exchanges=exchanges) for exchanges in (True, False))
    check(schedule)
    for stage, (plan, before) in enumerate(zip(schedule.plans, plain.plans)):
        assert [a for a in plan if a.kind is not F] == [a for a in before if a.kind is not F]
        assert peak_in_flight(plan) <= peak_in_flight(before) + 1
        assert len(fillers(plan)) == max(m - p, 0), stage


@given(st.integers(1, 8), st.integers(1, 24), st.sampled_from([0.0, 0.05, 0.25, 0.5, 1.0, 2.0]))
@settings(max_examples=80, deadline=None)
def test_no_step_is_longer(p: int, m: int, exchange: float) -> None:
    schedule, plain = (make_schedule("zb-h1", p, m, exchanges=exchanges) for exchanges in (True, False))
    assert length(schedule, exchange) <= length(plain, exchange) + 1e-9


def test_what_the_pairs_save() -> None:
    """F + W - min(W, exchange) for each pair; and the same change of places makes zb-v longer."""
    for p, m in ((2, 8), (4, 16), (8, 32), (8, 64)):
        for exchange, least in ((0.25, 0.04), (0.5, 0.08), (1.0, 0.13)):
            plain, schedule = (make_schedule("zb-h1", p, m, exchanges=exchanges) for exchanges in (False, True))
            assert 1 - length(schedule, exchange) / length(plain, exchange) >= least
    folded = make_schedule("zb-v", 8, 64, 2)
    changed = replace(folded, plans=tuple(tuple(filled(plan)) for plan in folded.plans))
    assert length(changed, 0.25) > 1.08 * length(folded, 0.25)
    assert make_schedule("zb-v", 8, 64, 2, exchanges=True).plans == folded.plans


def test_one_stage_by_hand() -> None:
    """F 2, of which 0.5 are exchanges, I 1 and W 1: W0 loses what it does beside F1's exchanges."""
    assert " ".join(map(str, make_schedule("zb-h1", 1, 2, exchanges=True).plans[0])) == "F0 I0 F1 W0+ I1 W1"
    (spans,) = simulate(
        make_schedule("zb-h1", 1, 2, exchanges=True), lambda v, a: 2.0 if a.kind is F else 1.0, exchanges=[0.5]
    )
    assert [(str(s.action), s.start, s.end, s.beside) for s in spans][2:5] == [
        ("F1", 3.0, 5.0, 0.0), ("W0+", 5.0, 5.5, 0.5), ("I1", 5.5, 6.5, 0.0),
    ]
    (planned,) = replay("zb-h1", 1, [2.0], [2.0], micro_batches=2, exchanges=Exchanges([0.5], [0.0]))
    assert planned == spans
    line = timeline("zb-h1", 1, [2.0], [2.0], micro_batches=2, exchanges=Exchanges([0.5], [0.0]))
    assert (line.span, line.filled) == (7.5, (0.5,))


@pytest.mark.parametrize("m", [3, 4, 11, 40])
def test_the_planners_seconds_are_the_simulators(m: int) -> None:
    """Stages and exchanges of different length, also where a long step continues a short one; filled seconds add up."""
    forward, backward, exchanges = [1.0, 1.3, 1.1, 1.2], [2.1, 2.0, 2.6, 2.4], [0.3, 0.4, 0.2, 3.0]
    known = Exchanges(exchanges, [0.2] * 4)
    spans = replay("zb-h1", 4, forward, backward, micro_batches=m, exchanges=known)
    line = timeline("zb-h1", 4, forward, backward, micro_batches=m, exchanges=known)
    assert line.filled == pytest.approx([sum(s.beside for s in row) for row in spans])
    assert line.busy == pytest.approx([sum(s.end - s.start for s in row) for row in spans])
    assert line.span == pytest.approx(max(row[-1].end for row in spans), rel=1e-3)


def test_the_picture_shows_what_runs_beside_a_pass() -> None:
    (spans,) = replay("zb-h1", 1, [2.0], [2.0], micro_batches=2, exchanges=Exchanges([0.5], [0.0]))
    case = case_of(load("runs/frontier-175b", ("layout.virtual_pipeline_size=1",)).config)[0]
    bars = [bar for span in spans for bar in _beside(span, 0, case)]
    assert [(bar.start, bar.end, bar.tall) for bar in bars] == [(4.5, 5.0, 0.4)]
    assert "0.5 s of it beside the exchanges of the pass before" in bars[0].title


def test_mistakes_are_found() -> None:
    """A weight pass that fills the pass that makes its products, an input's, or nothing."""
    late = Action(W, 0, fills=True)
    for plan, words in (
        ((Action(F, 0), Action(Kind.INPUT, 0), late), "W0\\+ fills no exchange"),
        ((Action(F, 0), late, Action(Kind.INPUT, 0)), "W0.* comes before its input pass"),
    ):
        with pytest.raises(ValueError, match=f"stage 0: {words}"):
            check_passes(replace(make_schedule("zb-h1", 1, 1), plans=(plan,)))
    plans = make_schedule("zb-h1", 1, 2, exchanges=True).plans[0]
    assert [str(a) for a in plans if a.fills] == ["W0+"]


def test_products_are_computed_once_in_order_and_in_equal_parts() -> None:
    """Seven of them in two exchanges of three; what is left waits for the pass's own turn; outside nothing runs."""
    done: list[int] = []
    accumulator = WgradAccumulator(lambda p: None, lambda p: p)

    def product(i: int) -> Callable[[], None]:
        return lambda: (done.append(i), None)[1] if not torch.is_grad_enabled() else pytest.fail("recorded")

    waiting = [product(i) for i in range(7)]
    accumulator.during_exchange()
    with accumulator.filling(waiting, 3):
        accumulator.during_exchange()
        assert done == [0, 1, 2]
        accumulator.during_exchange()
        assert done == [0, 1, 2, 3, 4]
    accumulator.during_exchange()
    assert done == [0, 1, 2, 3, 4] and accumulator.beside == 5
    accumulator.flush(waiting)
    assert done == list(range(7)) and not waiting
