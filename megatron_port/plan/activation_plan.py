"""Which activations the layers of each stage recompute: the least added time that brings a stage into its memory.

A stage is a covering knapsack. Its items are the sites of its layers: k layers that recompute a site add k times the
seconds of its operation to a micro-batch's backward pass, and save k times its bytes in every micro-batch in flight,
less one time, because the layer that runs backward has them again. Stages hold different numbers of micro-batches, so
they get different plans. Solved exactly, by branch and bound with the bound of the fractional problem (Dantzig, 1957).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

from megatron_port.config.layout import with_values
from megatron_port.config.schema import RunConfig
from megatron_port.model.activation_sites import RECOMPUTED, Site
from megatron_port.model.decoder_spec import model_spec
from megatron_port.plan.activations import site_bytes
from megatron_port.plan.case import Case, Machine, case_of, machine_of
from megatron_port.plan.layer import site_costs
from megatron_port.plan.links import Links, span
from megatron_port.plan.memory import StageMemory, stage_memory
from megatron_port.plan.rates import Rates

AFTER: dict[Site, Site] = {"residual": "norm2", "hidden": "activation"}
"""A site → the cheaper one whose argument it is; what saves the one may keep a copy, so both are recomputed."""
ROUNDS = 8
"""Times that a stage is solved anew because its peak moved to where the first solution saves less."""


@dataclass(frozen=True)
class Item:
    """A site of the layers of a stage."""

    site: Site
    seconds: float
    """Added to the backward pass of a micro-batch by one layer that recomputes it."""
    size: float
    """Bytes of one layer and micro-batch."""


def saved(item: Item, layers: int, held: float) -> float:
    """Return the bytes of a stage's peak that recomputing a site in so many layers saves.

    ``held``: micro-batches in flight.
    """
    return item.size * max(layers * held - 1, 0) if layers else 0.0


def cover(items: tuple[Item, ...], layers: int, held: float, lacking: float) -> dict[Site, int] | None:
    """Return the number of layers that recompute each site, of least seconds, that saves ``lacking`` bytes.

    ``layers``: those of the stage. None: even all of them save less.
    """
    ratio = {item.site: item.seconds / item.size for item in items if item.size > 0}
    useful = [item for item in items if item.site in ratio]
    # Such that a site comes after the one that it depends on.
    order = sorted(
        useful, key=lambda i: (max(ratio[i.site], ratio.get(AFTER.get(i.site, i.site), 0.0)), i.site in AFTER)
    )
    cheapest = [sorted(order[at:], key=lambda i: ratio[i.site]) for at in range(len(order) + 1)]
    best: tuple[float, dict[Site, int]] | None = None
    most = [sum(saved(i, layers, held) for i in order[at:]) for at in range(len(order) + 1)]

    def bound(at: int, lack: float) -> float:
        """Seconds at the least: the cheapest bytes first, the last site in part."""
        seconds = 0.0
        for item in cheapest[at]:
            if lack <= 0:
                break
            part = min(lack / (item.size * layers * held), 1.0)
            seconds, lack = seconds + part * layers * item.seconds, lack - part * item.size * layers * held
        return seconds

    def search(at: int, lack: float, seconds: float, chosen: dict[Site, int]) -> None:
        nonlocal best
        if lack <= 0:
            if best is None or seconds < best[0]:
                best = seconds, dict(chosen)
            return
        if lack > most[at] or (best is not None and seconds + bound(at, lack) >= best[0]):
            return
        item, limit = order[at], layers
        if AFTER.get(item.site) in ratio:
            limit = chosen.get(AFTER[item.site], 0)
        for count in range(limit, -1, -1):
            if count:
                chosen[item.site] = count
            search(at + 1, lack - saved(item, count, held), seconds + count * item.seconds, chosen)
            chosen.pop(item.site, None)

    search(0, lacking, 0.0, {})
    return None if best is None else best[1]


def stage_plan(case: Case, machine: Machine, stage: int, *, budget: float = 0.0) -> dict[Site, int] | None:
    """Return how many layers of a stage recompute each site; None: it does not fit even if all recompute everything.

    Args:
        budget: bytes for activations and the working memory of a layer; 0: what the rest leaves of the device.
    """
    case = replace(case, recompute="none", dropped=())
    layers = [i for start, stop in case.of_stage(case.layer_ranges, stage) for i in range(start, stop)]
    items, lacking = site_items(case, machine), 0.0
    found: dict[Site, int] | None = {}
    for _ in range(ROUNDS):
        tried = replace(case, dropped=_dropped(case.model.num_layers, layers, found)) if found else case
        memory = stage_memory(tried, machine, stage)
        over = _over(memory, machine, budget)
        if over <= 0:
            return found
        lacking += over / (1 + (machine.hardware.fragmentation if not budget else 0.0)) + 1
        found = cover(items, len(layers), memory.in_flight, lacking)
        if found is None:
            return None
    return None


def _over(memory: StageMemory, machine: Machine, budget: float) -> float:
    """Return the bytes that a stage needs beyond its budget, or beyond its device."""
    if budget:
        return memory.activations + memory.working - budget
    return memory.total - machine.cluster.memory_gb * 1e9


@lru_cache(maxsize=256)
def site_items(case: Case, machine: Machine) -> tuple[Item, ...]:
    """Return the sites of a layer with their seconds and bytes, for one micro-batch on one rank."""
    layer = model_spec(case.model).layers[0]
    costs = site_costs(case, layer, Rates.of(machine), Links.of(machine), span(machine, case.tp, 1))
    sizes = site_bytes(case, layer)
    return tuple(Item(site, costs[site].backward + costs[site].backward_tensor, sizes[site]) for site in RECOMPUTED)


def _dropped(count: int, layers: list[int], counts: dict[Site, int]) -> tuple[tuple[Site, ...], ...]:
    """Return the sites that each of ``count`` layers recomputes; the first of ``layers`` do, whose micro-batches wait
    longest where a stage has several chunks."""
    place = {layer: number for number, layer in enumerate(layers)}
    return tuple(
        tuple(site for site in RECOMPUTED if place.get(index, count) < counts.get(site, 0)) for index in range(count)
    )


def plan_activations(case: Case, machine: Machine, *, budget: float = 0.0) -> tuple[tuple[Site, ...], ...]:
    """Return the sites that each layer of the model recomputes.

    A stage that does not fit whatever it recomputes, recomputes everything.
    """
    out: list[tuple[Site, ...]] = [()] * case.model.num_layers
    for stage in range(case.pp):
        layers = [i for start, stop in case.of_stage(case.layer_ranges, stage) for i in range(start, stop)]
        counts = stage_plan(case, machine, stage, budget=budget)
        if counts is None:
            counts = dict.fromkeys(RECOMPUTED, len(layers))
        found = _dropped(case.model.num_layers, layers, counts)
        for index in layers:
            out[index] = found[index]
    return tuple(out)


def with_activation_plan(
    config: RunConfig, world_size: int | None = None, *, allow_fractions: bool = False
) -> RunConfig:
    """Return the run with ``activations.layers`` filled in, where its policy is plan and they are open.

    All ranks find the same, because nothing but the configuration is read. ``allow_fractions``: as ``case_of``.

    Raises:
        ConfigError: the cluster says too little to plan.
    """
    if config.activations.policy != "plan" or config.activations.layers:
        return config
    machine = machine_of(config)
    case, _ = case_of(config, world_size, allow_fractions=allow_fractions)
    found = plan_activations(case, machine, budget=config.activations.budget * 2**30)
    return with_values(config, {"activations.layers": tuple("+".join(sites) for sites in found)})


def stage_counts(case: Case, stage: int) -> dict[str, int]:
    """Return how many layers of a stage recompute each site, those that none does left out."""
    layers = [i for start, stop in case.of_stage(case.layer_ranges, stage) for i in range(start, stop)]
    counts = {site: sum(site in case.dropped[i] for i in layers) for site in RECOMPUTED} if case.dropped else {}
    return {site: count for site, count in counts.items() if count}


def describe(case: Case) -> list[str]:
    """Return a line for each run of stages that recompute the same: sites, and how many of the stage's layers do."""
    lines = []
    for stages in _alike([(stage_counts(case, stage), case.stage_layers(stage)) for stage in range(case.pp)]):
        counts, layers = stage_counts(case, stages[0]), case.stage_layers(stages[0])
        which = f"stage {stages[0]}" if len(stages) == 1 else f"stages {stages[0]} to {stages[-1]}"
        what = ", ".join(f"{site} {count}" for site, count in counts.items())
        lines.append(f"{which}: {what} of {layers} layers" if counts else f"{which}: nothing")
    return lines


def _alike(values: list[tuple[dict[str, int], int]]) -> list[list[int]]:
    """Return the indices of neighbouring equal values, together."""
    return [[index for index, _ in run] for _, run in groupby(enumerate(values), key=lambda pair: pair[1])]
