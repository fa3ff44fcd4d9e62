"""Campaigns: jobs, queues, money; scaling curves in and out of their range."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from megatron_port.cli.main import main
from megatron_port.core.config.loader import load
from megatron_port.core.errors import ConfigError
from megatron_port.tools.plan.campaign import CURVES, Terms, campaign, longest_job, offers, straggler
from megatron_port.tools.plan.case import case_of, machine_of
from megatron_port.tools.plan.failures import Recovery
from megatron_port.tools.plan.step import plan_step


def test_a_campaign_adds_up() -> None:
    terms = Terms(failure_hours=1e12, restart_s=0.0, checkpoint_s=0.0, power_w=1000.0, price=2.0, carbon=500.0)
    found = campaign(3600.0 * 24, 10, terms)  # nothing fails and nothing waits
    assert found.goodput == pytest.approx(1.0, abs=1e-6) and found.days == pytest.approx(1.0, rel=1e-6)
    assert found.device_hours == pytest.approx(240, rel=1e-6) and found.cost == pytest.approx(480, rel=1e-6)
    assert found.energy_mwh == pytest.approx(240 * 1000 * 1.2 / 1e6, rel=1e-6)
    assert found.carbon_t == pytest.approx(found.energy_mwh * 0.5)
    worse = campaign(3600.0 * 24, 10, Terms(failure_hours=100.0, wall_hours=2.0, wait_hours=3.0))
    assert worse.goodput < 1 and worse.jobs >= 13 and worse.days > 1 + 39 / 24 and worse.failures > 2
    recovery = Recovery(nodes=10, copy_s=60.0, spares=2)
    spared = campaign(3600.0 * 24, 10, terms, recovery)  # ten nodes of one device, two of them spare besides
    assert spared.device_hours == pytest.approx(288, rel=1e-6) and spared.days == pytest.approx(1.0, rel=1e-6)
    slowed = campaign(3600.0 * 24, 10, terms, replace(recovery, slower=0.5))
    assert slowed.train_hours == pytest.approx(24) and slowed.days == pytest.approx(1.5, rel=1e-6)
    often = Terms(failure_hours=100.0, wall_hours=12.0)
    within = campaign(3600.0 * 240, 10, often, recovery)
    assert within.jobs < campaign(3600.0 * 240, 10, often).jobs and within.failures == pytest.approx(
        within.device_hours / 1.2 / 100)
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


def test_plan_prints_both_ways_to_deal_with_failures(capsys: pytest.CaptureFixture[str]) -> None:
    """What a user reads for 1T on 3,072 GCDs: checkpoints after whole steps, copies, spares and what they are worth."""
    def lines(*more: str) -> str:
        assert main(["plan", "runs/frontier-1t", "--no-search", "--tokens", "1e12", "--campaign", *more]) == 0
        return capsys.readouterr().out.split("\ncampaign")[1]

    out = lines("--checkpoint-minutes", "60", "--spare-nodes", "2")
    config = load("runs/frontier-1t").config
    case, machine = case_of(config)[0], machine_of(config)
    step, copying = (plan_step(replace(case, copy_interval=k), machine).seconds for k in (0, 5))
    assert f"a checkpoint every {4 * step / 60:.3g} minutes" in out and "77% of them of a node" in out
    queued, within = (float(share) for share in re.findall(r"goodput ([\d.]+)%", out))
    assert 94 < queued < within < 98.5 and "with 2 spare nodes" in out and "2 are worth most" in out
    assert "in the job (engine native), 150 s" in out and "the job is queued again. Goodput by spares" in out
    slow = lines("--checkpoint-minutes", "60", "--copy-steps", "5", "--recover-seconds", "900", "--node-share", "1",
                 "--set", "layout.elastic=true")
    assert f"900 s and at most {5 * copying / 60:.3g} minutes" in slow and "a replica less" in slow
    assert "100% of them" in slow and float(re.findall(r"goodput ([\d.]+)%", slow)[1]) < within
    hours = []
    for when, spares in (("stop", 0), ("stop", 8), ("replace", 0), ("replace", 8)):
        out = lines("--checkpoint-minutes", "60", "--set", f"launch.when_lost={when}", "--set", "engine=native",
                    "--set", f"launch.spare_nodes={spares}", "--set", "checkpoint.memory_interval=1")
        hours.append(float(re.findall(r"([\d,]+) device hours with", out)[0].replace(",", "")))
        assert f'launch.when_lost = "{when}")' in out and ("and 8 spare nodes" in out) == bool(spares), out
    nodes, goodput = 3072 / 8, [float(share) for share in re.findall(r"goodput ([\d.]+)%", out)]
    assert hours[1] == pytest.approx(hours[0] * (1 + 8 / nodes), rel=1e-5)  # idle, whatever they are kept for
    assert hours[3] == pytest.approx(hours[1] * goodput[0] / goodput[1], rel=1e-3) and hours[3] < hours[1]
    old = lines("--checkpoint-minutes", "60", "--set", "launch.when_lost=replace", "--set", "engine=native", "--set",
                "checkpoint.save_interval=4")
    every, again = (float(minutes) for minutes in re.findall(r"(?:every|most) ([\d.]+) minutes", old)[:2])
    assert every <= again < 1.05 * every and "copies 0.00% of a step" in old, "back to a checkpoint"
    assert main(["plan", "runs/frontier-1t", "--no-search", "--campaign", "--node-share", "2", "--copy-steps", "-1",
                 "--spare-nodes", "65", "--failure-hours", "0", "--site-overhead", "0.5"]) == 2
    said = capsys.readouterr().err
    for text in ("--node-share 2: a share is at most 1", "--copy-steps -1: it is a number of 0 or above",
                 "--failure-hours 0: it is above 0", "--spare-nodes 65: at most 64 are planned",
                 "--site-overhead 0.5: a site takes at least"):
        assert text in said, said
    main(["plan", "runs/frontier-22b", "--nodes", "1", "--no-search", "--campaign"])
    assert "on one node no other" in capsys.readouterr().out


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
