"""Goodput under failures: the planner's closed forms beside an event simulation that shares no code with them."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.recovery_simulation import Scenario, figures, main, planned, scenarios, simulate
from megatron_port.core.errors import ConfigError
from megatron_port.tools.plan.failures import (
    FAILURE_HOURS,
    NODE_SHARE,
    Job,
    Pace,
    Recovery,
    best_interval,
    job_of,
    queued_again,
    recovered,
    with_spares,
)

ROOT = Path(__file__).resolve().parents[2]


def allowed(goodput: float, error: float) -> float:
    """Three standard errors, and a sixth of the square of the share lost: intervals that a job's start or end cuts
    short, and nodes that an elastic run no longer has, are no part of the closed forms."""
    return 3 * error + (1 - goodput) ** 2 / 6


OFTEN = Scenario(device_hours=FAILURE_HOURS / 4)
WITHIN = replace(OFTEN, recover=300.0)
FEW = Scenario(nodes=4, device_hours=32 * 4.0, recover=1800.0, checkpoint_steps=16, spares=8)


@pytest.mark.parametrize("scenario", [
    pytest.param(OFTEN, id="queued again"),
    pytest.param(replace(OFTEN, wall=3 * 3600.0), id="queued again, short jobs"),
    pytest.param(replace(OFTEN, wall=math.inf, start=3000.0), id="queued again, long starts, no limit"),
    pytest.param(replace(WITHIN, spares=8), id="recovered"),
    pytest.param(replace(WITHIN, spares=8, copy_steps=3, sent=700.0, copy=60.0, checkpoint_steps=120),
                 id="rare, slow and late copies"),
    pytest.param(replace(WITHIN, checkpoint_steps=8), id="no spare"),
    pytest.param(replace(WITHIN, checkpoint_steps=8, spares=1, wall=math.inf), id="one spare, no limit"),
    pytest.param(replace(WITHIN, node_share=0.1, checkpoint_steps=8), id="mostly processes"),
    pytest.param(replace(WITHIN, spares=1, replica_nodes=64), id="elastic"),
    pytest.param(replace(WITHIN, spares=8, pair_share=0.4, checkpoint_steps=12), id="pairs"),
    pytest.param(FEW, id="pairs by chance, few nodes"),
])
def test_closed_forms_are_the_simulations_mean(scenario: Scenario) -> None:
    found = figures(simulate(scenario, 120, 30.0))
    assert abs(found["goodput"] - planned(scenario)) <= allowed(found["goodput"], found["error"]), found


def test_the_record_is_of_these_forms() -> None:
    """Every recorded scenario's closed form is today's, and within the bound of what was simulated."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "recovery-simulation.json").read_text())["rows"]
    assert [row["name"] for row in rows] == list(scenarios())
    for row in rows:
        assert planned(Scenario(**row["scenario"])) == pytest.approx(row["planned"], abs=1e-6), row["name"]
        assert abs(row["goodput"] - row["planned"]) <= allowed(row["goodput"], row["error"]), row["name"]


def test_the_simulation_has_the_failures_it_is_told_and_repeats_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = Scenario(spares=2, recover=150.0)
    found = simulate(scenario, 100, 30.0)
    expected = 30 * 24 * 3072 / FAILURE_HOURS
    assert figures(found)["failures"] == pytest.approx(expected, abs=3 * math.sqrt(expected / 100))
    assert figures(simulate(scenario, 3, 30.0)) == figures(found[:3])
    names = list(scenarios())
    monkeypatch.setattr(sys, "argv", ["simulation", "--runs", "2", "--days", "0.2", "--out", str(tmp_path / "a.json")])
    main()
    written = json.loads((tmp_path / "a.json").read_text())
    assert [row["name"] for row in written["rows"]] == names and "--days 0.2" in written["command"]
    assert len(capsys.readouterr().out.splitlines()) == len(names)
    still = Scenario(device_hours=1e12, recover=150.0, wall=math.inf, start=0.0, checkpoint=0.0, copy=0.0)
    assert simulate(still, 1, 30.0)[0].goodput == pytest.approx(1.0)


def pace(**changes: float) -> Pace:
    return replace(Pace(interval_s=2000.0, checkpoint_s=30.0, restart_s=600.0, between_s=40000.0), **changes)


def test_limits_have_known_answers() -> None:
    """Daly's complete model for jobs without a limit; nothing lost where nothing fails; the parts one by one."""
    found = queued_again(pace()).goodput
    assert found == pytest.approx(2000 / (40000 * math.exp(600 / 40000) * math.expm1(2030 / 40000)))
    assert job_of(math.inf, 5.0, 3) == Job(15.0, 1.0) and job_of(7.0, math.inf, 1) == Job(7.0, 0.0)
    assert job_of(10.0, 20.0, 1).seconds == pytest.approx(20 * (1 - math.exp(-0.5)))
    never = pace(between_s=1e15, restart_s=0.0, checkpoint_s=0.0)
    recovery = Recovery(nodes=8, copy_s=100.0, spares=3)
    assert queued_again(never).goodput == pytest.approx(1) and recovered(never, recovery).goodput == pytest.approx(1)
    slower = replace(recovery, slower=0.25)
    assert recovered(never, slower).goodput == pytest.approx(0.8)
    # A node alone has no neighbour: each of its losses ends the job, whatever is spare.
    alone = replace(recovery, nodes=1, node_share=1.0)
    assert recovered(pace(), alone).job == queued_again(pace()).job
    # Nothing but processes: no job ends early.
    processes = recovered(pace(most_s=4e4), replace(recovery, node_share=0.0))
    assert processes.job == Job(4e4, 0.0) and processes.goodput > recovered(pace(most_s=4e4), recovery).goodput


def test_spares_are_worth_what_they_save() -> None:
    """Progress per held node rises to the best number and falls from there; without failures none is worth it."""
    recovery = Recovery(nodes=384, copy_s=800.0)
    often = with_spares(pace(between_s=15000.0, most_s=42600.0, interval_s=3600.0), recovery)
    best = often.index(max(often))
    assert 1 < best == len(often) - 3 and often[:best + 1] == sorted(often[:best + 1])
    assert with_spares(pace(between_s=1e12), recovery).index(max(with_spares(pace(between_s=1e12), recovery))) == 0
    one = recovered(pace(between_s=15000.0, most_s=42600.0, interval_s=3600.0), replace(recovery, spares=1))
    assert often[1] == pytest.approx(one.goodput * 384 / 385)


@pytest.mark.parametrize("recovery", [
    Recovery(nodes=8, copy_s=1.0, spares=-1), Recovery(nodes=8, copy_s=1.0, spares=100),
    Recovery(nodes=8, copy_s=1.0, node_share=1.5), Recovery(nodes=8, copy_s=1.0, recover_s=math.nan),
])
def test_nonsense_is_refused(recovery: Recovery) -> None:
    with pytest.raises(ConfigError, match="campaign"):
        recovery.check()


def test_the_published_numbers() -> None:
    """Table 5 of Llama 3: what takes a node, counted the other way round; an interruption each 3.1 hours."""
    nodes = 148 + 72 + 32 + 19 + 17 + 7 + 6 + 6 + 3 + 3 + 2 + 2 + 2 + 2
    assert pytest.approx(nodes / 419) == NODE_SHARE and pytest.approx(FAILURE_HOURS / 16384) == 54 * 24 / 419


def test_the_best_interval_is_best() -> None:
    """No interval around Daly's loses less, for failures from minutes to weeks apart."""
    for between in (3600.0, 86400.0, 1e6):
        best = best_interval(30.0, between)
        found = queued_again(pace(interval_s=best, between_s=between)).goodput
        for factor in (0.5, 0.8, 1.25, 2.0):
            assert queued_again(pace(interval_s=best * factor, between_s=between)).goodput <= found * 1.001
