"""What the layers of each stage do not keep of their activations: least added time that brings a stage into its memory.

Stages hold different numbers of micro-batches, so they get different plans. Sites are recomputed, partitioned over
tensor-parallel ranks or, where the rate of the link is known, swapped to the host (``plan.activation_plan``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby

from megatron_port.core.config.layout import with_values
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.model.ops import Site
from megatron_port.ext.memory.settings import chosen_chunk
from megatron_port.ext.memory.sites import RECOMPUTED, REPLICATED, SITES, Decision, choice
from megatron_port.tools.plan.case import Case, Machine, case_of, machine_of, machine_problems
from megatron_port.tools.plan.chunk import copied_sites, site_bytes
from megatron_port.tools.plan.layer import partition_costs, site_costs
from megatron_port.tools.plan.memory import HostLink, StageMemory, link_of, stage_memory
from megatron_port.tools.plan.overlap import with_tensor_chunks
from megatron_port.tools.plan.rates import Links, Rates, span
from megatron_port.tools.plan.step import chunk_costs

# The choice of what a stage's layers do not keep: least added seconds that save the bytes which the stage lacks.
#
# A covering knapsack. Its items are ways not to keep a site: k layers that recompute or partition it add k times its
# seconds to a micro-batch, and save k times its bytes in every micro-batch in flight, less one time, because the
# layer that runs backward has them again. Swapping costs nothing until the copies outlast the passes, and then the
# same for every byte, whatever it belongs to. So items are searched, by branch and bound with the bound of the
# fractional problem (Dantzig, 1957), and what they leave lacking is swapped, site by site. Exact but for whole layers
# of swapped sites, and where there are too many ways to look at (``MOST_LOOKED_AT``).

MOST_LOOKED_AT = 50_000
"""Nodes of the search at the most. Swapping whole layers is not in the bound, so that with 48 layers on one stage it
would look at millions; what the first thousands find is within 7 % of the least added seconds there."""

WHOLE_LOGITS = 1 << 30
"""Bytes of a micro-batch's logits beyond which a head whose device is not known takes chunks."""

Counts = dict[str, int]
"""A site's choice, as activations.layers states it → the number of layers that make it."""


@dataclass(frozen=True)
class Item:
    """A way not to keep a site of the layers of a stage."""

    site: Site
    seconds: float
    """Added to the passes of a micro-batch by one layer."""
    size: float
    """Bytes that one layer saves in one micro-batch."""
    way: Decision = "recompute"

    @property
    def name(self) -> str:
        """As activations.layers states it."""
        return choice(self.site, self.way)


@dataclass(frozen=True)
class Swap:
    """Sites that may be swapped: bytes of each, in how many layers, and the link."""

    sizes: Mapping[Site, float]
    layers: Mapping[Site, int]
    link: HostLink


def saved(item: Item, layers: int, held: float) -> float:
    """Return the bytes of a stage's peak that one item in so many layers saves.

    ``held``: micro-batches in flight.
    """
    return item.size * max(layers * held - 1, 0) if layers else 0.0


class _Search:
    """Branch and bound over the numbers of layers of each item; see :func:`cover`."""

    def __init__(
        self, items: Sequence[Item], layers: int, held: float, after: Mapping[Site, Site], swap: Swap | None
    ) -> None:
        self.layers, self.held, self.after, self.swap = layers, held, after, swap
        ratio = {item.name: item.seconds / item.size for item in items if item.size > 0}
        self.useful = {item.site for item in items if item.name in ratio}
        # Such that a site comes after the one that it depends on.
        self.order = sorted(
            (item for item in items if item.name in ratio),
            key=lambda i: (max(ratio[i.name], ratio.get(after.get(i.site, i.site), 0.0)), i.site in after),
        )
        self.cheapest = [
            sorted((i.seconds / i.size / held, i.size * layers * held) for i in self.order[at:])
            for at in range(len(self.order) + 1)
        ]
        self.swappable = [] if swap is None else sorted(
            ((size, site) for site, size in swap.sizes.items() if size > 0 and swap.layers.get(site, 0)), reverse=True
        )
        per_layer = sum(size * swap.layers[site] for size, site in self.swappable) if swap else 0.0
        self.segments = self._segments(per_layer)
        self.most = [
            sum(saved(i, layers, held) for i in self.order[at:]) + per_layer * held
            for at in range(len(self.order) + 1)
        ]
        self.best: tuple[float, Counts] | None = None
        self.looked_at = 0

    def _segments(self, most: float) -> list[tuple[float, float]]:
        """Seconds per saved byte, and saved bytes, of what is swapped first, then, and last."""
        if self.swap is None or not most:
            return []
        link, out, done = self.swap.link, [], 0.0
        ends = sorted((link.forward * link.rate, link.backward * link.rate))
        for slope, end in zip((0.0, 1.0, 2.0), (*ends, most)):
            width = max(min(end, most) - done, 0.0)
            out.append((slope / link.rate / self.held, width * self.held))
            done += width
        return out

    def bound(self, at: int, lack: float) -> float:
        """Seconds at the least: the cheapest bytes first, the last in part."""
        seconds = 0.0
        for ratio, size in sorted([*self.cheapest[at], *self.segments]):
            if lack <= 0:
                break
            part = min(lack, size)
            seconds, lack = seconds + part * ratio, lack - part
        return seconds

    def fill(self, lack: float, used: Mapping[Site, int]) -> tuple[float, Counts] | None:
        """Swap what still lacks: seconds and counts; None: all that is left saves less."""
        if self.swap is None:
            return None
        free = {site: self.swap.layers[site] - used.get(site, 0) for _, site in self.swappable}
        counts: dict[Site, int] = {}

        def add(site: Site, size: float, count: int) -> None:
            nonlocal lack
            if count > 0:
                before = counts.get(site, 0)
                counts[site] = before + count
                free[site] -= count
                lack -= size * (max(counts[site] * self.held - 1, 0) - (max(before * self.held - 1, 0)))

        for size, site in self.swappable:  # the largest first, as long as whole layers fit into what lacks
            add(site, size, min(free[site], int((lack + size) // (size * self.held)) if lack > 0 else 0))
        for size, site in reversed(self.swappable):  # then the smallest that is enough
            if lack > 0 and free[site] > 0 and size * (self.held - (0 if counts.get(site) else 1)) >= lack:
                add(site, size, 1)
        for size, site in self.swappable:
            while lack > 0 and free[site] > 0:
                add(site, size, 1)
        if lack > 0:
            return None
        moved = sum(size * counts.get(site, 0) for size, site in self.swappable)
        return self.swap.link.seconds(moved), {choice(site, "swap"): n for site, n in counts.items()}

    def note(self, seconds: float, counts: Counts) -> None:
        """Keep a solution if none before it was as good."""
        if self.best is None or seconds < self.best[0]:
            self.best = seconds, {name: n for name, n in counts.items() if n}

    def run(self, at: int, lack: float, seconds: float, chosen: Counts, used: dict[Site, int]) -> None:
        """Look at every number of layers of the items from ``at`` on."""
        self.looked_at += 1
        if lack <= 0:
            self.note(seconds, chosen)
            return
        if self.best is not None and self.looked_at > MOST_LOOKED_AT:
            return
        if lack > self.most[at] or (self.best is not None and seconds + self.bound(at, lack) >= self.best[0]):
            return
        moved = self.fill(lack, used)
        if moved is not None:
            self.note(seconds + moved[0], chosen | moved[1])
        if at == len(self.order):
            return
        item, before = self.order[at], used.get(self.order[at].site, 0)
        limit = self.layers - before
        if self.after.get(item.site) in self.useful and item.way == "recompute":
            limit = min(limit, used.get(self.after[item.site], 0))
        for count in range(limit, -1, -1):
            chosen[item.name], used[item.site] = count, before + count
            self.run(at + 1, lack - saved(item, count, self.held), seconds + count * item.seconds, chosen, used)
        chosen.pop(item.name, None)
        used[item.site] = before


def cover(
    items: Sequence[Item], layers: int, held: float, lacking: float, *, after: Mapping[Site, Site],
    swap: Swap | None = None,
) -> Counts | None:
    """Return the number of layers that make each choice, of least seconds, that saves ``lacking`` bytes.

    Args:
        layers: those of the stage.
        held: micro-batches in flight.
        after: a site → the one whose argument it is, and without which it is not recomputed.
        swap: None: nothing is swapped.

    Returns:
        None: even all of them save less.
    """
    search = _Search(items, layers, held, after, swap)
    search.run(0, lacking, 0.0, {}, {})
    return None if search.best is None else search.best[1]


# Activation plans from what the first steps of a run measured, instead of the planner's times.

@dataclass(frozen=True, kw_only=True)
class StageMeasures:
    """The largest of what the ranks of a stage measured, for one micro-batch; 0: not known."""

    seconds: dict[Site, float] = field(default_factory=dict)
    """Seconds to run a site's operation again in one layer."""
    sizes: dict[Site, float] = field(default_factory=dict)
    """Bytes that one layer saves of a site."""
    forward: float = 0.0
    """Seconds of the stage's forward passes, and of its backward passes without what they ran again."""
    backward: float = 0.0
    copy: float = 0.0
    """Seconds per byte to or from the host."""
    gather: float = 0.0
    """Seconds per byte of what tensor-parallel ranks gather."""

    def row(self) -> list[float]:
        """Return the numbers in a fixed order, for a collective."""
        by_site = [each.get(site, 0.0) for each in (self.seconds, self.sizes) for site in SITES]
        return [*by_site, self.forward, self.backward, self.copy, self.gather]

    @classmethod
    def of_row(cls, row: Sequence[float]) -> StageMeasures:
        """Return what :meth:`row` made a list of."""
        count = len(SITES)
        return cls(
            seconds=dict(zip(SITES, row[:count])), sizes=dict(zip(SITES, row[count : 2 * count])),
            forward=row[-4], backward=row[-3], copy=row[-2], gather=row[-1],
        )


ROW = len(StageMeasures().row())
"""Numbers of one stage."""


def measured_sizes(case: Case, measures: StageMeasures) -> dict[Site, float]:
    """Return the bytes of each site; of a copy that is saved in place of an operation's argument, as the argument's.

    That much is kept when the copy is dropped and made again.
    """
    sizes = {site: measures.sizes.get(site, 0.0) for site in SITES}
    for site, (reader, copy) in copied_sites(case, model_spec(case.model).layers[0]).items():
        moved = max(min(copy - sizes[site], sizes[reader]), 0.0)
        sizes[site], sizes[reader] = sizes[site] + moved, sizes[reader] - moved
    return sizes


def measured_items(case: Case, measures: StageMeasures) -> tuple[Item, ...]:
    """Return the ways to recompute or partition a site of a layer."""
    sizes, copied = measured_sizes(case, measures), copied_sites(case, model_spec(case.model).layers[0])
    items = [Item(site, measures.seconds.get(site, 0.0), sizes[site]) for site in RECOMPUTED]
    if measures.gather > 0 and case.tp > 1 and not case.sequence_parallel:
        items += [
            Item(site, measures.gather * sizes[site], sizes[site] * (1 - 1 / case.tp), "partition")
            for site in REPLICATED if site not in copied
        ]
    return tuple(items)


def measured_swap(case: Case, measures: StageMeasures, layers: dict[Site, int]) -> Swap | None:
    """Return what a stage may swap, ``layers`` of each site; None: the link to the host was not measured."""
    if measures.copy <= 0:
        return None
    sizes = measured_sizes(case, measures)
    for site in copied_sites(case, model_spec(case.model).layers[0]):
        sizes[site] = 0.0
    return Swap(sizes, layers, HostLink(1 / measures.copy, measures.forward, measures.backward))


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
    """Return the run with ``layout.tp_overlap_chunks`` decided, where it is 0, ``activations.head_chunk``, where it is
    -1, and ``activations.layers`` filled in, where its policy is plan and they are open.

    All ranks find the same, because nothing but the configuration is read. ``allow_fractions``: as ``case_of``.

    Raises:
        ConfigError: the cluster says too little to plan.
    """
    config, _ = with_tensor_chunks(config, world_size, allow_fractions=allow_fractions)
    if config.activations.head_chunk < 0:
        chunk = _head_chunk(config, world_size, allow_fractions=allow_fractions)
        config = with_values(config, {"activations.head_chunk": chunk})
    if config.activations.policy != "plan" or config.activations.layers:
        return config
    machine = machine_of(config)
    case, _ = case_of(config, world_size, allow_fractions=allow_fractions)
    found = plan_activations(case, machine, budget=config.activations.budget * 2**30)
    return with_values(config, {"activations.layers": tuple("+".join(sites) for sites in found)})


def _head_chunk(config: RunConfig, world_size: int | None, *, allow_fractions: bool) -> int:
    """Return the tokens of a chunk of the head, 0 for whole logits: chunks where the last stage does not fit else, or,
    on a device of which too little is known, where whole logits take more than :data:`WHOLE_LOGITS` bytes."""
    case, _ = case_of(config, world_size, allow_fractions=allow_fractions)
    tokens, columns = case.model.seq_length // case.cp * case.micro_batch, case.padded_vocab // case.tp
    chunk = chosen_chunk(columns, case.width)
    if chunk >= tokens:
        return 0
    machine = Machine(cluster=config.cluster, hardware=config.hardware, calibration=config.calibration)
    if machine.cluster.memory_gb <= 0 or machine_problems(machine):
        return chunk if tokens * columns * case.width > WHOLE_LOGITS else 0
    last = stage_memory(case, machine, case.grid.last_stage)
    return chunk if last.total > machine.cluster.memory_gb * 1e9 else 0


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
