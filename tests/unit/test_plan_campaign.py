"""Campaigns: Daly's interval, goodput, queues, money; scaling curves in and out of their range."""

from __future__ import annotations

import math

import pytest

from megatron_port.cli.main import main
from megatron_port.core.config.loader import load
from megatron_port.core.errors import ConfigError
from megatron_port.tools.plan.campaign import (
    CURVES,
    FAILURE_HOURS,
    Terms,
    best_interval,
    campaign,
    goodput,
    longest_job,
    offers,
    straggler,
)


def test_the_best_interval_is_best() -> None:
    """No interval around Daly's loses less, for failures from minutes to weeks apart."""
    for between in (3600.0, 86400.0, 1e6):
        best = best_interval(30.0, between)
        found = goodput(best, 30.0, 600.0, between)
        for factor in (0.5, 0.8, 1.25, 2.0):
            assert goodput(best * factor, 30.0, 600.0, between) <= found * 1.001
    # Llama 3: an interruption each 3.1 hours on 16,384 GPUs (419 in 54 days)
    assert pytest.approx(FAILURE_HOURS / 16384) == 54 * 24 / 419


def test_a_campaign_adds_up() -> None:
    terms = Terms(failure_hours=1e12, restart_s=0.0, checkpoint_s=0.0, power_w=1000.0, price=2.0, carbon=500.0)
    found = campaign(3600.0 * 24, 10, terms)  # nothing fails and nothing waits
    assert found.goodput == pytest.approx(1.0, abs=1e-6) and found.days == pytest.approx(1.0, rel=1e-6)
    assert found.device_hours == pytest.approx(240, rel=1e-6) and found.cost == pytest.approx(480, rel=1e-6)
    assert found.energy_mwh == pytest.approx(240 * 1000 * 1.2 / 1e6, rel=1e-6)
    assert found.carbon_t == pytest.approx(found.energy_mwh * 0.5)
    worse = campaign(3600.0 * 24, 10, Terms(failure_hours=100.0, wall_hours=2.0, wait_hours=3.0))
    assert worse.goodput < 1 and worse.jobs >= 13 and worse.days > 1 + 39 / 24 and worse.failures > 2
    assert longest_job(100, (91, 183, 9472), (2.0, 6.0, 12.0)) == 6.0 and longest_job(1, (), ()) == 0.0
    assert straggler(10.0, 8.0, 1.5) == 14.0


@pytest.mark.parametrize("terms", [
    Terms(failure_hours=0.0), Terms(restart_s=-1.0), Terms(overhead=0.5), Terms(price=math.nan),
    Terms(wall_hours=0.1, restart_s=600.0),
])
def test_nonsense_is_refused(terms: Terms) -> None:
    with pytest.raises(ConfigError, match="campaign"):
        campaign(1e5, 8, terms)


def test_scaling_curves_are_the_published_ones() -> None:
    """Chinchilla's own 70B on 1.4 T tokens, and the way back from a loss to the tokens."""
    curve = CURVES[0]
    assert curve.loss(70e9, 1.4e12) == pytest.approx(1.936, abs=0.002)
    assert curve.tokens_to(curve.loss(8e9, 2e11), 8e9) == pytest.approx(2e11, rel=1e-9)
    assert curve.tokens_to(1.0, 8e9) == math.inf and curve.in_range(8e9, 2e11) and not curve.in_range(1e12, 2e11)


@pytest.mark.slow
def test_plan_prints_a_campaign_and_what_a_budget_buys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "runs/frontier-22b", "--nodes", "16", "--tokens", "1e9", "--campaign", "--loss", "3",
                 "--price", "1.5", "--carbon", "400"]) == 0
    out = capsys.readouterr().out
    assert "goodput" in out and "MWh" in out and "t CO2" in out and "cost" in out and "of at most 2 h" in out
    assert "outside the runs that it was fitted to" in out
    assert main(["plan", "runs/frontier-22b", "--nodes", "16", "--price", "-1"]) == 2


def test_the_cheaper_cluster_comes_first() -> None:
    config = load("runs/frontier-22b").config
    found = offers(config, 1e9, 1e9, {"dgx-h100": 2.0, "selene": 2.0}, 0.0, nodes=(8,))
    assert [o.cluster for o in found] == ["dgx-h100", "selene"] and found[0].cost < found[1].cost
    assert offers(config, 1e9, 1.0, {"selene": 2.0}, 0.0, nodes=(8,)) == []
    with pytest.raises(ConfigError, match="--price"):
        offers(config, 1e9, 1e9, {}, 0.0)
