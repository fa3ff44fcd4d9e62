"""A campaign in words: what `plan --campaign` prints, and what a budget buys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_port.core.config.loader import load
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.errors import ConfigError
from megatron_port.tools.plan.campaign import CURVES, Campaign, Terms, campaign, longest_job, straggler
from megatron_port.tools.plan.case import case_of, machine_of
from megatron_port.tools.plan.search import options_of, search
from megatron_port.tools.plan.verdict import Plan

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


def campaign_lines(plan: Plan, given: Mapping[str, float], loss: float = 0.0) -> list[str]:
    """Return the lines that price the plan's budget."""
    terms, devices, step = terms_of(plan, given), plan.case.world, plan.step
    found = campaign(plan.budget.steps * step.seconds, devices, terms)
    slow = straggler(step.seconds, step.split.compute, SLOW)
    lines = [
        f"campaign  {plan.budget.steps:,} steps, {found.train_hours:,.1f} h of them: {found.days:.3g} days in "
        f"{found.jobs} job{'s' if found.jobs > 1 else ''}"
        + (f" of at most {terms.wall_hours:g} h" if terms.wall_hours else "")
        + (f", each {terms.wait_hours:g} h in the queue" if terms.wait_hours else ", waits in the queue left out"),
        f"          goodput {found.goodput:.1%}: {found.failures:.3g} failures expected (one in "
        f"{terms.failure_hours:,.0f} device hours), a checkpoint every {found.interval_s / 60:.3g} minutes holds up "
        f"{terms.checkpoint_s:.3g} s, {terms.restart_s / 60:.3g} minutes to start again",
        f"          one device at {SLOW:g} times the time would make a step {slow:.3g} s "
        f"({slow / step.seconds - 1:+.0%}): find it before it is met (preflight)",
        f"          {found.device_hours:,.0f} device hours" + _spent(found, terms),
    ]
    return [*lines, *loss_lines(plan, found, loss)]


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
