"""What a run will take: steps, node-hours, jobs, its end and its price, by the planner. Arithmetic, no measurement."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from megatron_port.core.config.launch_checks import wall_seconds
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.errors import ConfigError
from megatron_port.ext.telemetry.console import duration
from megatron_port.tools.launch.record import Planned
from megatron_port.tools.plan.verdict import make_plan

START_SECONDS = 120.0
"""Taken off each job: start of the ranks, model, checkpoint, first step. An estimate."""


def planned(config: RunConfig) -> Planned:
    """Return what is expected of a run; without the planner's numbers where it knows too little of the cluster."""
    nodes = config.cluster.nodes + config.launch.spare_nodes
    known = Planned(
        steps=config.training.steps, save_interval=config.checkpoint.save_interval, nodes=nodes,
        tokens_per_step=config.batch.global_batch_size * config.model.seq_length,
    )
    try:
        plan = make_plan(config, neighbours=False)
    except ConfigError:
        return known
    seconds = plan.step.seconds
    if not math.isfinite(seconds):
        return known
    return Planned(**{**vars(known), "seconds_per_step": seconds, "node_hours": known.steps * seconds * nodes / 3600})


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Forecast of a run that starts at once and is never interrupted but by its time limit."""

    planned: Planned
    jobs: int
    """Jobs of ``launch.time`` that it takes, one after another; 0: not known."""
    seconds: float
    node_hours: float
    charge: float
    unit: str


def forecast(config: RunConfig) -> Forecast:
    """Return the forecast of a whole run, by jobs of ``launch.time``."""
    known = planned(config)
    limit = wall_seconds(config.launch.time) or 0
    usable = limit - START_SECONDS - config.launch.signal_seconds
    work = known.steps * known.seconds_per_step
    if not work:
        jobs, seconds = 0, 0.0
    elif work + START_SECONDS <= limit or usable <= 0:
        jobs, seconds = 1, min(work + START_SECONDS, limit)
    else:
        jobs = math.ceil(work / usable)
        seconds = work + jobs * START_SECONDS
    hours = seconds / 3600 * known.nodes
    return Forecast(planned=known, jobs=jobs, seconds=seconds, node_hours=hours, unit=config.cluster.charge_unit,
                    charge=hours * config.cluster.charge_per_node_hour)


def lines(config: RunConfig, now: float | None = None) -> list[str]:
    """Return the forecast in words, for ``launch submit --dry-run``."""
    found, plan = forecast(config), planned(config)
    nodes, spare = config.cluster.nodes, config.launch.spare_nodes
    head = f"nodes: {plan.nodes}" + (f" ({nodes} and {spare} spare)" if spare else "")
    limit = wall_seconds(config.launch.time) or 0
    most = limit / 3600 * plan.nodes
    out = [
        f"{head}, {config.cluster.gpus_per_node} ranks on each; time limit {config.launch.time}: at most {most:,.1f} "
        "node-hours for each job"
    ]
    if not found.jobs:
        return [*out, f"{plan.steps:,} steps; the planner knows too little of {config.cluster.name} to say how long "
                "they take (cluster.peak_tflops, cluster.memory_gb, [hardware])"]
    end = time.strftime("%Y-%m-%d %H:%M", time.localtime((time.time() if now is None else now) + found.seconds))
    several = f"; {found.jobs} jobs, one after another" if found.jobs > 1 else ""
    out.append(f"{plan.steps:,} steps of {plan.seconds_per_step:.3g} s (planned): {duration(found.seconds)}{several}")
    if found.jobs > 1 and config.launch.when_stopped == "stop":
        out.append("launch.when_stopped is stop: each of these jobs has to be submitted by hand")
    price = "" if found.unit == "node-hours" else f", {found.charge:,.1f} {found.unit}"
    out.append(f"predicted: {found.node_hours:,.1f} node-hours{price}; ends {end} if it starts now and nothing fails")
    return out
