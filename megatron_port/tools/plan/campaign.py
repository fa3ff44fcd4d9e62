"""A whole training run beside its steps: failures, checkpoints, queue limits, energy, cost, carbon, and a loss.

What failures cost is ``plan.failures``' part: with jobs that are queued again, and with ranks replaced inside a job. A
loss is that of published scaling curves, L = E + A/N^α + B/D^β of N parameters and D tokens, with the ranges of the
runs that they were fitted to: outside them a number is an extrapolation, and is printed as one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_port.core.config.loader import load
from megatron_port.core.config.schema import LaunchConfig, RunConfig
from megatron_port.core.errors import ConfigError
from megatron_port.tools.plan.case import case_of, machine_of
from megatron_port.tools.plan.failures import (
    FAILURE_HOURS,
    Outcome,
    Pace,
    Recovery,
    best_interval,
    queued_again,
    recovered,
    with_spares,
)
from megatron_port.tools.plan.memory import copied, host_problem
from megatron_port.tools.plan.search import options_of, search
from megatron_port.tools.plan.step import plan_step
from megatron_port.tools.plan.text import Plan

START_SECONDS = 600.0
"""From a failure to the next step: found, started, a checkpoint read; an assumption, `--restart-minutes` changes it."""
OVERHEAD = 1.2
"""Energy of a site over that of its computers (PUE); an assumption."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A scaling curve: L = E + A/N^α + B/D^β."""

    name: str
    floor: float
    a: float
    alpha: float
    b: float
    beta: float
    parameters: tuple[float, float]
    tokens: tuple[float, float]

    def loss(self, parameters: float, tokens: float) -> float:
        """Loss in nats per token."""
        return float(self.floor + self.a / parameters**self.alpha + self.b / tokens**self.beta)

    def tokens_to(self, loss: float, parameters: float) -> float:
        """Tokens after which a model of this size has the loss; infinity: it never has."""
        left = loss - self.floor - self.a / parameters**self.alpha
        return float((self.b / left) ** (1 / self.beta)) if left > 0 else math.inf

    def in_range(self, parameters: float, tokens: float) -> bool:
        """Whether runs like this were among those that the curve was fitted to."""
        return self.parameters[0] <= parameters <= self.parameters[1] and self.tokens[0] <= tokens <= self.tokens[1]


CURVES = (
    Curve(name="Hoffmann et al., arXiv 2203.15556, approach 3", floor=1.69, a=406.4, alpha=0.34, b=410.7, beta=0.28,
        parameters=(44e6, 16e9), tokens=(5e9, 500e9)),
    Curve(name="Besiroglu et al., arXiv 2404.10102, the same runs", floor=1.8172, a=482.01, alpha=0.3478, b=2085.43,
        beta=0.3658, parameters=(44e6, 16e9), tokens=(5e9, 500e9)),
)
"""Both of text in English with tokenizers of their own: losses of another corpus differ."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Assumptions of a campaign: failures, checkpoints, queues, prices."""

    failure_hours: float = FAILURE_HOURS
    """Device hours between failures."""
    restart_s: float = START_SECONDS
    checkpoint_s: float = 60.0
    """For which a checkpoint holds up training."""
    interval_s: float = 0.0
    """Between checkpoints; 0: the best."""
    wall_hours: float = 0.0
    """Longest job of the queue; 0: no limit."""
    wait_hours: float = 0.0
    """In the queue before each job."""
    power_w: float = 0.0
    """Watts of a device with its share of the node; 0: not known."""
    overhead: float = OVERHEAD
    price: float = 0.0
    """Price of a device hour."""
    carbon: float = 0.0
    """Grams of CO2 a kWh."""

    def check(self) -> None:
        """Raise ConfigError for what no campaign has."""
        bad = [f"{name} is {value}" for name, value in vars(self).items() if not (value >= 0 and math.isfinite(value))]
        if self.failure_hours <= 0:
            bad.append(f"failure_hours is {self.failure_hours}; it is above 0")
        if self.overhead < 1:
            bad.append(f"overhead is {self.overhead}; a site takes at least what its computers take, 1")
        if bad:
            raise ConfigError([f"campaign: {text}" for text in bad])


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """Hours, jobs, energy and cost of a number of steps."""

    train_hours: float
    """Steps alone."""
    interval_s: float
    goodput: float
    """Share of the devices' time that is progress, queues left out."""
    failures: float
    """Expected over the campaign."""
    jobs: int
    days: float
    """From the first submission to the last step, queues included."""
    device_hours: float
    """Spare nodes included."""
    energy_mwh: float
    cost: float
    carbon_t: float


def pace_of(devices: int, terms: Terms, step_s: float = 0.0) -> Pace:
    """Return the pace of a run on ``devices``. Checkpoints come after whole steps of ``step_s``.

    Raises:
        ConfigError: terms that make no sense, or jobs too short to make progress.
    """
    terms.check()
    between = terms.failure_hours * 3600 / devices
    interval = terms.interval_s or best_interval(terms.checkpoint_s, between)
    interval = max(1, round(interval / step_s)) * step_s if step_s else interval
    most = math.inf
    if terms.wall_hours:
        most = terms.wall_hours * 3600 - terms.restart_s - terms.checkpoint_s  # started, saved at its end
        if most <= 0:
            raise ConfigError(
                f"campaign: jobs of {terms.wall_hours:g} h make no progress with {terms.restart_s / 60:g} minutes to "
                "start; ask for a longer class of the queue"
            )
    return Pace(
        interval_s=interval, checkpoint_s=terms.checkpoint_s, restart_s=terms.restart_s, between_s=between, most_s=most
    )


def campaign(
    seconds: float, devices: int, terms: Terms, recovery: Recovery | None = None, step_s: float = 0.0, *,
    idle: float = 0.0,
) -> Campaign:
    """Return hours, jobs, energy and cost of ``seconds`` of steps on ``devices``.

    ``recovery``: ranks are replaced inside the job; None: it is queued again. ``idle``: spare nodes of such a job, for
    preflight to choose from, over those that train.

    Raises:
        ConfigError: terms that make no sense, or jobs too short to make progress.
    """
    pace = pace_of(devices, terms, step_s)
    if recovery is not None:
        recovery.check()
    found = outcome(pace, seconds, recovery)
    trained = seconds / found.progress
    endless = math.isinf(pace.most_s) and not found.job.ended  # one job, however long
    attempts = 1.0 if endless else trained / found.job.seconds
    jobs = max(attempts, 1.0)
    held = trained + jobs * found.start_s + max(jobs - attempts * found.job.ended, 0.0) * terms.checkpoint_s
    spare = 1 + (recovery.spares / recovery.nodes if recovery is not None else idle)
    device_hours = held / 3600 * devices * spare
    energy = device_hours * terms.power_w * terms.overhead / 1e6
    return Campaign(
        train_hours=seconds / 3600, interval_s=pace.interval_s, goodput=seconds / held,
        failures=held / pace.between_s, jobs=math.ceil(jobs), days=(held + jobs * terms.wait_hours * 3600) / 86400,
        device_hours=device_hours, energy_mwh=energy, cost=device_hours * terms.price,
        carbon_t=energy * 1000 * terms.carbon / 1e6,
    )


def outcome(pace: Pace, seconds: float, recovery: Recovery | None) -> Outcome:
    """Return the outcome of ``seconds`` of steps; where jobs have no limit, an elastic one lasts as long."""
    if recovery is None:
        return queued_again(pace)
    unlimited = recovery.replica_nodes and math.isinf(pace.most_s)
    return recovered(replace(pace, most_s=seconds) if unlimited else pace, recovery)


def longest_job(nodes: float, queue_nodes: tuple[int, ...], queue_hours: tuple[float, ...]) -> float:
    """Hours of the queue's class that takes so many nodes; 0: no class is known, or none takes them."""
    return next((hours for most, hours in zip(queue_nodes, queue_hours) if nodes <= most), 0.0)


def straggler(step_s: float, compute_s: float, slow: float) -> float:
    """Seconds of a step with one device that computes ``slow`` times as long: all wait for it in every pass."""
    return step_s + (slow - 1) * compute_s


# A campaign in words: what `plan --campaign` prints, and what a budget buys.

SLOW = 1.5
"""Time of the slowest outlier over the median, among alike devices of clusters (arXiv 2208.11035)."""


def terms_of(plan: Plan, given: Mapping[str, float]) -> Terms:
    """The terms of a plan's cluster, and what was ``given`` besides."""
    cluster, hardware = plan.machine.cluster, plan.machine.hardware
    held = sum(m.weights + m.optimizer for m in plan.memory) / len(plan.memory)
    copied = held / (hardware.host_link_gb * 1e9) if hardware.host_link_gb else 60.0  # the copy that blocks
    terms = Terms(
        power_w=hardware.power_w, checkpoint_s=copied,
        wall_hours=longest_job(plan.nodes, cluster.queue_nodes, cluster.queue_hours),
    )
    return replace(terms, **given)


def recovery_of(plan: Plan, pace: Pace, asked: Mapping[str, float]) -> tuple[Recovery, float, str]:
    """Return recovery inside the plan's job, the seconds of its step without copies, and why they do not fit a node.

    ``asked``: fields of :class:`Recovery`; ``copy_steps`` between copies, 0: the run's, else those that lose least; and
    ``elastic``, 1: without a spare the run continues on fewer replicas.
    """
    case, machine, own = plan.case, plan.machine, dict[str, Any](asked)
    nodes, interval = max(1, round(plan.nodes)), round(own.pop("copy_steps", 0)) or case.copy_interval
    elastic = own.pop("elastic", 0.0)
    plain = plan_step(replace(case, copy_interval=0), machine).seconds
    if not interval:
        once = copied(replace(case, copy_interval=1), machine)
        least = max(best_interval(once.seconds, pace.between_s), once.sending) / plain
        interval = max(1, math.ceil(least - 1e-9))
    case = replace(case, copy_interval=interval)
    step = plan_step(case, machine).seconds
    found = Recovery(
        nodes=nodes, copy_s=interval * step, late_s=copied(case, machine).sending, slower=step / plain - 1,
        replica_nodes=max(1, round(nodes / case.dp)) if elastic and case.dp > 1 else 0,
    )
    return replace(found, **own), plain, host_problem(case, machine)


def campaign_lines(
    plan: Plan, given: Mapping[str, float], asked: Mapping[str, float], loss: float, launch: LaunchConfig
) -> list[str]:
    """Return the lines that price the plan's budget: with jobs queued again, and recovered (``recovery_of``).

    Device hours, energy and cost are those of the run as ``launch`` has it.
    """
    terms, devices, step = terms_of(plan, given), plan.case.world, plan.step
    recovery, plain, problem = recovery_of(plan, pace_of(devices, terms), asked)
    seconds, replaced = plan.budget.steps * plain, launch.when_lost == "replace"
    pace = pace_of(devices, terms, plain)
    if replaced and not plan.case.copy_interval and not asked.get("copy_steps"):  # each goes back to a checkpoint
        recovery, problem = replace(recovery, copy_s=pace.whole_s, late_s=0.0, slower=0.0), ""
    queued = campaign(seconds, devices, terms, None, plain, idle=launch.spare_nodes / recovery.nodes)
    within = campaign(seconds, devices, terms, recovery, plain)
    found, spares = (within, recovery.spares) if replaced else (queued, launch.spare_nodes)
    slow = straggler(step.seconds, step.split.compute, SLOW)
    lines = [
        f"campaign  {plan.budget.steps:,} steps, {found.train_hours:,.1f} h of them, in jobs"
        + (f" of at most {terms.wall_hours:g} h" if terms.wall_hours else "")
        + (f", each {terms.wait_hours:g} h in the queue" if terms.wait_hours else ", waits in the queue left out"),
        f"          a failure every {pace.between_s / 3600:.3g} h (one in {terms.failure_hours:,.0f} device hours), "
        f"{recovery.node_share:.0%} of them of a node; a checkpoint every {found.interval_s / 60:.3g} minutes holds up "
        f"{terms.checkpoint_s:.3g} s",
        f"          queued again after each, {terms.restart_s / 60:.3g} minutes to start: {_figures(queued)}",
        *_within(plan, recovery, within, outcome(pace, seconds, recovery).pace),
        *([f"          its copies do not fit: {problem}"] if problem and not plan.host_problem else []),
        f"          one device at {SLOW:g} times the time would make a step {slow:.3g} s "
        f"({slow / step.seconds - 1:+.0%}): find it before it is met (preflight)",
        f"          {found.device_hours:,.0f} device hours with {'recovery in the job' if replaced else 'new jobs'} "
        f'(launch.when_lost = "{launch.when_lost}")' + (f" and {_spare(spares)}" if spares else "")
        + _spent(found, terms),
    ]
    return [*lines, *loss_lines(plan, found, loss)]


def _figures(found: Campaign) -> str:
    return (
        f"goodput {found.goodput:.2%}, {found.days:.4g} days, {found.failures:.3g} failures, {found.jobs:,} "
        f"job{'s' if found.jobs > 1 else ''}"
    )


def _within(plan: Plan, recovery: Recovery, found: Campaign, pace: Pace) -> list[str]:
    """The lines of recovery inside the job, and of how many spares are worth their nodes."""
    then = "a replica less" if recovery.replica_nodes else "the job is queued again"
    native = "" if plan.case.engine.name == "native" else " (engine native)"
    lines = [
        f"          recovered in the job{native}, {recovery.recover_s:.3g} s and at most {recovery.copy_s / 60:.3g} "
        f"minutes of work for each, copies {recovery.slower:.2%} of a step: {_figures(found)}",
    ]
    if recovery.nodes == 1:
        return [*lines, "          a lost node ends the job: on one node no other holds its copies"]
    worth = with_spares(pace, recovery)
    shown = ", ".join(f"{count}: {value:.2%}" for count, value in enumerate(worth))
    best = worth.index(max(worth))
    return [
        *lines, f"          with {_spare(recovery.spares)}; without one left {then}. Goodput by spares, which count as "
        f"held: {shown}; {best} {'is' if best == 1 else 'are'} worth most (launch.spare_nodes)",
    ]


def _spare(count: int) -> str:
    return f"{count} spare node{'' if count == 1 else 's'}"


def _spent(found: Campaign, terms: Terms) -> str:
    out = ""
    if terms.power_w:
        out += f"; {found.energy_mwh:,.1f} MWh ({terms.power_w:g} W a device, site {terms.overhead:g})"
    else:
        out += "; energy not known (hardware.power_w)"
    if terms.carbon:
        out += f", {found.carbon_t:,.1f} t CO2 at {terms.carbon:g} g/kWh"
    if terms.price:
        out += f"; cost {found.cost:,.0f} at {terms.price:g} a device hour"
    return out


def loss_lines(plan: Plan, found: Campaign, loss: float) -> list[str]:
    """The loss that published curves give for the budget, and the days to another."""
    n, tokens, out = float(plan.parameters), plan.budget.tokens, []
    for curve in CURVES:
        note = "" if curve.in_range(n, tokens) else "; outside the runs that it was fitted to"
        out.append(f"          loss {curve.loss(n, tokens):.3f} after {tokens:.3g} tokens by {curve.name}{note}")
        if loss:
            needed = curve.tokens_to(loss, n)
            out.append(
                f"          loss {loss:g} " + (
                    f"after {needed:.3g} tokens, {found.days * needed / tokens:.3g} days"
                    + ("" if curve.in_range(n, needed) else "; outside its range") if needed < 1e16 else
                    "is below what a model of this size reaches by it"
                )
            )
    return out


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Layout, days and cost that a budget buys on one cluster."""

    cluster: str
    devices: int
    days: float
    cost: float
    layout: str


def offers(
    config: RunConfig, tokens: float, budget: float, prices: Mapping[str, float], most_days: float,
    nodes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
) -> list[Offer]:
    """The fastest layouts that a budget pays for, cheapest first; the best number of nodes for each cluster.

    ``prices``: of a device hour by cluster.

    Raises:
        ConfigError: no price, or a cluster that is not shipped.
    """
    if not prices or any(p <= 0 for p in prices.values()):
        raise ConfigError("--buy needs --price CLUSTER=PRICE of a device hour, above 0, for each cluster to compare")
    out = []
    for name, price in prices.items():
        found = load(f"clusters/{name}").config
        best: Offer | None = None
        for count in nodes:
            offer = _offer(config, found, name, count, tokens, price)
            if offer is None or offer.cost > budget or (most_days and offer.days > most_days):
                continue
            if best is None or offer.days < best.days:
                best = offer
        if best is not None:
            out.append(best)
    return sorted(out, key=lambda o: (o.cost, o.days))


def _offer(
    config: RunConfig, cluster: RunConfig, name: str, nodes: int, tokens: float, price: float
) -> Offer | None:
    mine = replace(
        config, cluster=replace(cluster.cluster, nodes=nodes), hardware=cluster.hardware,
        calibration=cluster.calibration, layout=replace(
            config.layout, data_parallel_size=0, tensor_parallel_size=1, pipeline_parallel_size=1,
            virtual_pipeline_size=1, pipeline_split=(), sequence_parallel=False, context_parallel_size=1,
            expert_parallel_size=1,
        ), batch=replace(config.batch, micro_batch_size=1),
    )
    machine = machine_of(mine)
    if nodes > 1 and not machine.hardware.nics:
        return None
    try:
        case, _ = case_of(mine, nodes * cluster.cluster.gpus_per_node, allow_fractions=True)
    except ConfigError:
        return None
    found = search(case, machine, replace(options_of(mine, case), micro=(1, 2, 4), chunks=(1,)))
    if not found:
        return None
    step = found[0].step
    seconds = tokens / step.tokens_per_second
    terms = Terms(wall_hours=longest_job(nodes, cluster.cluster.queue_nodes, cluster.cluster.queue_hours), price=price)
    whole = campaign(seconds, case.world, terms)
    return Offer(
        cluster=name, devices=case.world, days=whole.days, cost=whole.cost, layout=found[0].case.label(),
    )


def offer_lines(found: Sequence[Offer], budget: float) -> list[str]:
    """Offers as lines."""
    if not found:
        return [f"buy       nothing of these trains it for {budget:,.0f}; more days, fewer tokens or a smaller model"]
    return ["buy       for " + f"{budget:,.0f}, the fastest that each cluster allows:"] + [
        f"          {o.cluster}: {o.devices} devices, {o.days:.3g} days, {o.cost:,.0f}; {o.layout}" for o in found
    ]
