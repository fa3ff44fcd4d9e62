"""What the layers of each stage do not keep of their activations: least added time that brings a stage into its memory.

Stages hold different numbers of micro-batches, so they get different plans. Sites are recomputed, partitioned over
tensor-parallel ranks or, where the rate of the link is known, swapped to the host (``plan.activation_cover``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby

from megatron_port.core.config.layout import with_values
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.model.activation_sites import RECOMPUTED, REPLICATED, SITES, Decision, choice
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.model.ops import Site
from megatron_port.tools.plan.activation_cover import Counts, Item, Swap, cover
from megatron_port.tools.plan.activation_profile import StageMeasures, measured_items, measured_swap
from megatron_port.tools.plan.activations import copied_sites, site_bytes
from megatron_port.tools.plan.case import Case, Machine, case_of, machine_of
from megatron_port.tools.plan.layer import partition_costs, site_costs
from megatron_port.tools.plan.links import Links, span
from megatron_port.tools.plan.memory import StageMemory, stage_memory
from megatron_port.tools.plan.rates import Rates
from megatron_port.tools.plan.step import chunk_costs
from megatron_port.tools.plan.swap import link_of

AFTER: dict[Site, Site] = {"residual": "norm2", "hidden": "activation"}
"""A site → the cheaper one whose argument it is; what saves the one may keep a copy, so both are recomputed."""
ROUNDS = 8
"""Times that a stage is solved anew because its peak moved to where the first solution saves less."""


Ways = tuple[Decision, ...]
WAYS: Ways = ("recompute", "swap", "partition")
"""Treatments of a site that a plan may choose from."""


def stage_plan(
    case: Case, machine: Machine, stage: int, *, budget: float = 0.0, ways: Ways = WAYS,
    measures: StageMeasures | None = None, quick: bool = False,
) -> Counts | None:
    """Return how many layers of a stage make each choice; None: it does not fit whatever they choose.

    Args:
        budget: bytes for activations and the working memory of a layer; 0: what the rest leaves of the device.
        ways: what may be chosen; engine deepspeed only recomputes.
        measures: seconds and bytes of the stage's sites; None: the planner's.
        quick: messages between stages are estimated, for a search.
    """
    case = replace(case, recompute="none", dropped=())
    ways = ways if case.engine.name == "native" else ("recompute",)
    layers = stage_layers(case, stage)
    offered = site_items(case, machine) if measures is None else measured_items(case, measures)
    items, lacking = [item for item in offered if item.way in ways], 0.0
    swap = _swap(case, machine, stage, measures) if "swap" in ways else None
    found: Counts | None = {}
    for _ in range(ROUNDS):
        tried = replace(case, dropped=_dropped(case.model.num_layers, layers, found)) if found else case
        memory = stage_memory(tried, machine, stage, quick=quick)
        over = _over(memory, machine, budget)
        if over <= 0:
            return found
        lacking += over / (1 + (machine.hardware.fragmentation if not budget else 0.0)) + 1
        found = cover(items, len(layers), memory.in_flight, lacking, after=AFTER, swap=swap)
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
    """Return the ways to recompute or partition a site of a layer, for one micro-batch on one rank."""
    layer = model_spec(case.model).layers[0]
    known = case, layer, Rates.of(machine), Links.of(machine), span(machine, case.tp, 1)
    costs, sizes = site_costs(*known), site_bytes(case, layer)
    again = [Item(site, costs[site].backward + costs[site].backward_tensor, sizes[site]) for site in RECOMPUTED]
    if not case.partitions:
        return tuple(again)
    shared, kept = partition_costs(*known), 1 - 1 / case.tp
    for site in (site for site in REPLICATED if site not in copied_sites(case, layer)):
        cost = shared[choice(site, "partition")]
        again.append(Item(site, cost.forward + cost.backward_tensor, sizes[site] * kept, "partition"))
    return tuple(again)


def _swap(case: Case, machine: Machine, stage: int, measures: StageMeasures | None) -> Swap | None:
    """Return what a stage may swap; None: the link to the host is not known."""
    count = case.stage_layers(stage)
    layers = dict.fromkeys(SITES, count)
    # What comes from another stage is held for its gradient.
    layers["input"] = count - sum(start > 0 for start, _ in case.of_stage(case.layer_ranges, stage))
    if measures is not None:
        return measured_swap(case, measures, layers)
    chunks, sizes = case.of_stage(chunk_costs(case, machine), stage), site_bytes(case)
    link = link_of(machine, sum(c.forward + c.forward_tensor for c in chunks),
                   sum(c.backward + c.backward_tensor for c in chunks))
    for site in copied_sites(case, model_spec(case.model).layers[0]):
        sizes[site] = 0.0  # only a copy of it is saved
    return None if link is None else Swap(sizes, layers, link)


def stage_layers(case: Case, stage: int) -> list[int]:
    """Return the numbers of a stage's layers, by chunk."""
    return [i for start, stop in case.of_stage(case.layer_ranges, stage) for i in range(start, stop)]


def _dropped(count: int, layers: list[int], counts: Counts) -> tuple[tuple[str, ...], ...]:
    """Return the choices of each of ``count`` layers. The first of ``layers``, whose micro-batches wait longest where a
    stage has several chunks, recompute, those after them partition, and the last swap."""
    out: list[list[str]] = [[] for _ in range(count)]
    for site in SITES:
        again = counts.get(site, 0)
        shared = again + counts.get(choice(site, "partition"), 0)
        swapped = len(layers) - counts.get(choice(site, "swap"), 0)
        for place, layer in enumerate(layers):
            way: Decision = "recompute" if place < again else "partition" if place < shared else "keep"
            way = "swap" if place >= swapped else way
            if way != "keep":
                out[layer].append(choice(site, way))
    return tuple(map(tuple, out))


def plan_activations(
    case: Case, machine: Machine, *, budget: float = 0.0, ways: Ways = WAYS,
    measures: Sequence[StageMeasures] = (), quick: bool = False,
) -> tuple[tuple[str, ...], ...]:
    """Return the choices of each layer of the model. ``measures``: by stage; empty: the planner's times. ``quick``: as
    :func:`stage_plan` takes it.

    A stage that does not fit whatever it chooses, recomputes everything.
    """
    out: list[tuple[str, ...]] = [()] * case.model.num_layers
    for stage in range(case.pp):
        layers = stage_layers(case, stage)
        counts = stage_plan(
            case, machine, stage, budget=budget, ways=ways, measures=measures[stage] if measures else None,
            quick=quick,
        )
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


def stage_counts(case: Case, stage: int) -> Counts:
    """Return how many layers of a stage make each choice, those that none does left out."""
    out: Counts = {}
    for layer in stage_layers(case, stage) if case.dropped else ():
        for chosen in case.dropped[layer]:
            out[chosen] = out.get(chosen, 0) + 1
    places = {site: place for place, site in enumerate(SITES)}
    return dict(sorted(out.items(), key=lambda pair: next(n for s, n in places.items() if s == pair[0].split(":")[0])))


def describe(case: Case) -> list[str]:
    """Return a line for each run of stages that choose the same: sites, and how many of the stage's layers do."""
    lines = []
    for stages in _alike([(stage_counts(case, stage), case.stage_layers(stage)) for stage in range(case.pp)]):
        counts, layers = stage_counts(case, stages[0]), case.stage_layers(stages[0])
        which = f"stage {stages[0]}" if len(stages) == 1 else f"stages {stages[0]} to {stages[-1]}"
        what = ", ".join(f"{site} {count}" for site, count in counts.items())
        lines.append(f"{which}: {what} of {layers} layers" if counts else f"{which}: nothing")
    return lines


def _alike(values: list[tuple[Counts, int]]) -> list[list[int]]:
    """Return the indices of neighbouring equal values, together."""
    return [[index for index, _ in run] for _, run in groupby(enumerate(values), key=lambda pair: pair[1])]
