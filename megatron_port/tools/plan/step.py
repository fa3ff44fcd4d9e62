"""The time of one optimizer step, and where it goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, reduce
from statistics import NormalDist
from typing import Any

from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.model.spec import LayerSpec
from megatron_port.core.pipeline.schedules import Action, Kind, Span, make_schedule
from megatron_port.core.registry import SCHEDULES
from megatron_port.ext.telemetry.flops import causal_flops, hardware_flops, model_flops
from megatron_port.tools.plan.case import Case, Machine, grid_of
from megatron_port.tools.plan.elements import expert_elements, gathered_elements, spanning_elements, trained_elements
from megatron_port.tools.plan.layer import (
    embedding_cost,
    head_cost,
    layer_cost,
    partition_costs,
    prediction_cost,
    site_costs,
)
from megatron_port.tools.plan.memory import copied, link_of, offloaded, swapped_bytes, updated_elements
from megatron_port.tools.plan.rates import Cost, Links, Rates, span
from megatron_port.tools.plan.simulate import flow, simulate

# The pipeline of one step, by simulating its schedule with the real times of every stage.
#
# ``pipeline.schedules`` gives the order of passes, the same that the engine runs, ``plan.simulate`` their times.
# A stage does its passes in order; a pass waits for what it needs from its neighbour. Beyond a few times p micro-
# batches every further one adds the same time, so long steps are simulated in part and continued along that line.

@dataclass(frozen=True)
class Timeline:
    """A step's forward and backward passes."""

    span: float
    """Seconds from the first forward to the end of the last backward."""
    busy: tuple[float, ...]
    """Seconds that each stage computes."""
    filled: tuple[float, ...]
    """Seconds of exchanges of rows on each stage that weight passes fill."""


@dataclass(frozen=True)
class Exchanges:
    """Seconds of each chunk's passes for one micro-batch in which rows are on their way between experts' ranks."""

    forward: Sequence[float]
    """Seconds that weight passes can fill; 0 for an engine without that."""
    backward: Sequence[float]

    @property
    def filled(self) -> bool:
        """Whether weight passes fill any."""
        return any(self.forward)


def _prices(forward: Sequence[float], backward: Sequence[float], exchanges: Exchanges | None) -> list[float]:
    """Seconds by ``Flow.price``. The gradients of a layer's weights are as many products as those of its inputs, and
    exchange nothing."""
    travel = [0.0] * len(backward) if exchanges is None else exchanges.backward
    weights = [(b - x) / 2 for b, x in zip(backward, travel)]
    return [*forward, *backward, *(b - w for b, w in zip(backward, weights)), *weights]


def replay(
    name: str, stages: int, forward: Sequence[float], backward: Sequence[float], *, micro_batches: int,
    exchanges: Exchanges | None = None,
) -> list[list[Span]]:
    """Every pass of every stage with its time, transfers left out; the arguments are those of :func:`timeline`."""
    fills = exchanges is not None and exchanges.filled
    schedule = make_schedule(name, stages, micro_batches, len(forward) // stages, exchanges=fills)
    prices = _prices(forward, backward, exchanges)
    at = {kind: i * len(forward) for i, kind in enumerate((Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT))}

    def cost(virtual: int, action: Action) -> float:
        return prices[at[action.kind] + virtual]

    return simulate(schedule, cost, exchanges=() if exchanges is None else exchanges.forward)


def timeline(
    schedule: str, stages: int, forward: Sequence[float], backward: Sequence[float], *, micro_batches: int,
    transfer: float = 0.0, hidden: bool = False, duplex: bool = True, quick: bool = False,
    exchanges: Exchanges | None = None,
) -> Timeline:
    """Simulate a step.

    ``forward``, ``backward``: seconds of each chunk for one micro-batch, stages × chunks a stage of them.
    ``transfer``: seconds of one activation between stages; ``hidden``: it does not hold up its sender.
    ``duplex``: a stage sends and receives at once; otherwise the receiver, too, spends the time of the transfer.
    ``quick``: an estimate without a simulation, for a search. ``exchanges``: None where passes exchange no rows.
    """
    chunks = len(forward) // stages
    grid = grid_of(stages, chunks, schedule == "zb-v")
    both = [f + b for f, b in zip(forward, backward)]
    each = [sum(both[grid.virtual_stage(s, c)] for c in range(chunks)) for s in range(stages)]
    costs = _prices(forward, backward, exchanges)
    filled, fills = (0.0,) * stages, exchanges is not None and exchanges.filled
    if exchanges is not None and schedule == "zb-h1":  # ``pipeline.schedules``: from the stages' number of them on
        pairs = max(micro_batches - stages, 0)
        filled = tuple(pairs * min(w, x) for w, x in zip(costs[3 * len(forward) :], exchanges.forward))
    busy = tuple(micro_batches * t - f for t, f in zip(each, filled))
    if quick:
        sends = 0.0 if hidden else transfer * chunks * (1 if duplex else 2)
        slowest = max(  # the ends have one neighbour
            t - f / micro_batches + sends * ((s > 0) + (s < stages - 1)) for s, (t, f) in enumerate(zip(each, filled))
        )
        span = _quick_span(schedule, stages, forward, backward, transfer, slowest, micro_batches)
        return Timeline(span, busy, filled)
    if stages == 1 and chunks == 1:
        return Timeline(busy[0], busy, filled)

    def length(count: int) -> float:
        order = flow(make_schedule(schedule, stages, count, chunks, exchanges=fills))
        prices = [costs[price] for price in order.price]
        if exchanges is not None:
            prices = [price - h for price, h in zip(prices, order.hidden(prices, exchanges.forward))]
        return max(order.times(prices, transfer=transfer, hidden=hidden, duplex=duplex)[1])

    # Where the line begins: within 0.1 % of whole simulations with uneven stages.
    most = (2 if chunks == 1 else 3) * stages + micro_batches % stages
    if schedule == "gpipe" or schedule in SCHEDULES.added or micro_batches <= most + stages:
        return Timeline(length(micro_batches), busy, filled)
    short, long = length(most), length(most + stages)
    return Timeline(short + (long - short) / stages * (micro_batches - most), busy, filled)


def _quick_span(
    schedule: str, stages: int, forward: Sequence[float], backward: Sequence[float], transfer: float, slowest: float,
    micro_batches: int,
) -> float:
    """The ``slowest`` stage for each micro-batch but the first, and what fills the pipeline: under 1F1B one micro-batch
    through all stages, with interleaving only its part of a chunk; under zero-bubble the weights' gradients fill the
    rest, and a forward's time per stage is left (arXiv 2401.10241 with F = I = W), under zb-v half of it."""
    chunks = len(forward) // stages
    if schedule in ("zb-h1", "zb-v"):
        fill = sum(forward) * (stages - 1) / stages / chunks + 2 * (stages - 1) * transfer
        return fill + micro_batches * slowest
    through = (sum(forward) + sum(backward)) / chunks + 2 * (stages - 1) * transfer
    return through + (micro_batches - 1 / chunks) * slowest


# Seconds and bytes of an optimizer rule's products and collectives in one rank's step.

ROUNDS = 3
"""All-reduces of sums in a step, of rows and columns at most."""


def matrix_bytes(case: Case) -> tuple[float, float]:
    """Return the bytes that a rank sends in a step to bring matrices together and take them apart again: among ranks
    that divide state, and among tensor-parallel ones. Its share stays where it is owned."""
    width = 2 if case.width == 2 else case.wide
    held = 2.0 * case.rule.matrices / (case.pp * case.tp * case.shards) * width
    return held * (case.shards - 1) / case.shards, held * (case.tp - 1) / case.tp


def rule_seconds(case: Case, rates: Rates, links: Links) -> float:
    """Return the seconds of a step that the rule takes beyond the memory's: products, and what it moves."""
    if not (case.rule.products or case.rule.sums):
        return 0.0
    group, near = span(links.machine, case.shards, case.tp), span(links.machine, case.tp, 1)
    ranks = case.pp * case.tp * case.shards
    width = 2 if case.width == 2 else case.wide
    held = case.rule.matrices / ranks * width
    moved = 2 * (links.all_to_all(held, group) + links.all_to_all(held, near))
    sums = case.rule.sums / (case.pp * case.tp) * case.wide
    added = ROUNDS * (links.collective(sums, group) + links.collective(sums, near)) if sums else 0.0
    speed = rates.matmul if case.width == 2 else (rates.fp32 or rates.matmul / 4)
    return case.rule.products / ranks / speed + moved + added


@dataclass(frozen=True, kw_only=True)
class Split:
    """Seconds of a step by cause, on the stage that is busiest; they add up to the step."""

    compute: float
    """Matmuls, attention, memory-bound kernels, recompute."""
    tensor: float
    """Tensor-parallel collectives that nothing hides."""
    experts: float
    """All-to-all of tokens between expert-parallel ranks that nothing hides."""
    context: float
    """Keys, values and their gradients between ranks that share a sequence, beyond what attention hides."""
    pipeline: float
    """Activations between stages, where they hold up compute."""
    bubble: float
    """The busiest stage waits: filling, draining, imbalance."""
    data: float
    """Gradients summed over replicas and weights gathered, beyond what compute hides."""
    optimizer: float
    """Gradient norm, update, clearing gradients; moving and updating what is offloaded; copies in the nodes' memory."""
    host: float
    """Devices wait for their hosts, which start operations one by one."""
    jitter: float
    """Waiting for the slowest of many equal devices."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Name → seconds."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """A planned step. Rates are of one device."""

    split: Split
    seconds: float
    samples: int
    model_tflops: float
    """Model FLOPs per second of one device, 10^12 (recompute not counted)."""
    causal_tflops: float
    """Model FLOPs with half of attention's, the pairs that the causal mask leaves."""
    hardware_tflops: float
    """With recompute."""
    mfu: float
    """Model FLOPs over the datasheet's peak."""
    hfu: float
    """Hardware FLOPs over the datasheet's peak."""
    tokens_per_second: float
    timeline: Timeline


def chunk_costs(case: Case, machine: Machine) -> list[Cost]:
    """The cost of each chunk of the model, for one micro-batch, with the forward pass of the teacher's."""
    out, teacher = _model_costs(case, machine), case.of_teacher
    if teacher is None:
        return out
    return [cost + beside.forward_alone for cost, beside in zip(out, _model_costs(teacher, machine), strict=True)]


def _model_costs(case: Case, machine: Machine) -> list[Cost]:
    alike = _alike(case)
    layers, first, last = _unit_costs(alike, machine)
    spec = model_spec(case.model)
    if not case.dropped:
        return _plain_chunks(case, layers, first, last, is_host=machine.hardware.is_host)
    sites = {id(layer): _site_costs(alike, machine, layer) for layer in _kinds(case)}
    out = []
    for start, stop in case.layer_ranges:
        kinds = [_of_kind(layers, layer).times(count) for layer, count in spec.kinds(start, stop)]
        dropped = zip(spec.layers[start:stop], case.dropped[start:stop])
        again = [
            sites[id(layer)][chosen] for layer, choices in dropped for chosen in choices if chosen in sites[id(layer)]
        ]
        cost = reduce(Cost.__add__, [*kinds, *again], Cost())
        moved = swapped_bytes(case, start, stop)
        link = link_of(machine, *cost.passes)
        if moved and link is not None:
            beyond = moved / link.rate
            cost += Cost(max(beyond - link.forward, 0.0), max(beyond - link.backward, 0.0))
        out.append(cost)
    out[0] = out[0] + first
    out[-1] = out[-1] + last
    return [cost.with_host(is_device=machine.hardware.is_host) for cost in out]


def _alike(case: Case) -> Case:
    """What a layer costs does not hang on how many there are where: a search asks for few different ones."""
    return replace(
        case, pp=1, vp=1, dp=1, shard=0, split=(), schedule="1f1b", zero_stage=0, global_batch=1,
        micro_batches=1 if case.dtype != "fp8" else case.micro_batches,  # which share the weights' casts
        dropped=(),
    )


def _plain_chunks(
    case: Case, layers: tuple[tuple[LayerSpec, Cost], ...], first: Cost, last: Cost, *, is_host: bool
) -> list[Cost]:
    """The cost of each chunk where every layer keeps all; chunks of equal layers are added up once."""
    spec, ranges = model_spec(case.model), case.layer_ranges
    alone = len(layers) == 1
    known: dict[Any, Cost] = {}
    out = []
    for index, (start, stop) in enumerate(ranges):
        ends = index == 0, index == len(ranges) - 1
        key = (stop - start if alone else tuple((id(x), n) for x, n in spec.kinds(start, stop)), ends)
        if key not in known:
            kinds = [_of_kind(layers, layer).times(count) for layer, count in spec.kinds(start, stop)]
            cost = reduce(Cost.__add__, kinds, Cost())
            cost = cost + first if ends[0] else cost
            known[key] = (cost + last if ends[1] else cost).with_host(is_device=is_host)
        out.append(known[key])
    return out


def unit_seconds(case: Case, machine: Machine) -> list[float]:
    """Seconds of both passes of [embedding, layer 0, …, head] for one micro-batch, for a split of the layers."""
    layers, first, last = _unit_costs(_alike(case), machine)
    found = [_of_kind(layers, layer) for layer in model_spec(case.model).layers]
    return [sum(cost.passes) for cost in (first, *found, last)]


@lru_cache(maxsize=1024)
def _site_costs(case: Case, machine: Machine, layer: LayerSpec) -> dict[str, Cost]:
    """Return the cost of recomputing or partitioning each site of a layer."""
    known = case, layer, Rates.of(machine), Links.of(machine), span(machine, case.tp, 1)
    return {str(site): cost for site, cost in site_costs(*known).items()} | partition_costs(*known)


def _kinds(case: Case) -> list[LayerSpec]:
    """Each kind of layer once; equal ones are one object."""
    return list({id(layer): layer for layer in model_spec(case.model).layers}.values())


def _of_kind(costs: tuple[tuple[LayerSpec, Cost], ...], layer: LayerSpec) -> Cost:
    return next(cost for known, cost in costs if known is layer or known == layer)


@lru_cache(maxsize=1024)
def _unit_costs(case: Case, machine: Machine) -> tuple[tuple[tuple[LayerSpec, Cost], ...], Cost, Cost]:
    """Each kind of layer, the embedding, the head with what predicts further tokens."""
    rates, links = Rates.of(machine), Links.of(machine)
    group = span(machine, case.tp, 1)
    further = (prediction_cost(case, part, rates, links, group) for part in model_spec(case.model).head.predictions)
    return (
        tuple((layer, layer_cost(case, layer, rates, links, group)) for layer in _kinds(case)),
        embedding_cost(case, rates, links, group), sum(further, head_cost(case, rates, links, group)),
    )


def plan_step(case: Case, machine: Machine, *, quick: bool = False) -> StepPlan:
    """Plan one step. ``quick``: the pipeline in closed form instead of simulated (for a search)."""
    rates, links = Rates.of(machine), Links.of(machine)
    chunks = chunk_costs(case, machine)
    line, parts = _passes(case, machine, chunks, quick=quick)
    copies = copied(case, machine)
    split = Split(
        **parts, data=data_seconds(case, links, chunks),
        optimizer=optimizer_seconds(case, rates) + rule_seconds(case, rates, links)
        + offloaded(case, machine).seconds + copies.seconds,
    )
    if not case.engine.graphed:  # the step's loss is a number on the host, which only then begins the next
        split = replace(split, host=split.host + rates.host_step)
    late = copies.late(case.copy_interval, split.total, case.disk_interval)
    split = replace(split, optimizer=split.optimizer + late)
    return summary(case, machine, split, line)


def pass_seconds(case: Case, machine: Machine) -> float:
    """Seconds of a step's passes by the closed form; what replicas exchange and the update come on top."""
    return sum(_passes(case, machine, chunk_costs(case, machine), quick=True)[1].values())


def _passes(
    case: Case, machine: Machine, chunks: Sequence[Cost], *, quick: bool
) -> tuple[Timeline, dict[str, float]]:
    """The pipeline of a step, and the parts of :class:`Split` that its passes take on the busiest stage."""
    forward, backward = ([c.passes[i] for c in chunks] for i in (0, 1))
    m = case.micro_batches
    transfer, hidden, duplex = 0.0, case.engine.transfer_overlap, case.engine.duplex_transfers
    if case.pp > 1:
        stream = case.model.seq_length / case.cp * case.micro_batch * case.model.hidden_size * case.width
        transfer = Links.of(machine).transfer(stream / (case.tp if case.sequence_parallel else 1), case)
    line = timeline(
        case.schedule, case.pp, forward, backward, micro_batches=m, transfer=transfer, hidden=hidden, duplex=duplex,
        quick=quick, exchanges=exchanges_of(case, chunks),
    )
    worst = max(range(case.pp), key=lambda s: line.busy[s])
    mine = case.of_stage(chunks, worst)
    tensor = m * sum(c.forward_tensor + c.backward_tensor for c in mine)
    sends = 0 if hidden else m * case.vp * ((worst > 0) + (worst < case.pp - 1)) * (1 if duplex else 2)
    pipeline = min(sends * transfer, line.span - line.busy[worst])
    exchange = m * sum(c.forward_exchange + c.backward_exchange for c in mine) - line.filled[worst]
    context = m * sum(c.forward_context + c.backward_context for c in mine)
    host = m * sum(c.forward_host + c.backward_host for c in mine)
    compute = line.busy[worst] - tensor - exchange - context - host
    # Every pass waits for its neighbours and every step for all: the pace is that of the slowest device at computing.
    jitter = machine.hardware.jitter * slowest_of(case.world) * compute
    return line, {
        "compute": compute, "tensor": tensor, "experts": exchange, "context": context, "pipeline": pipeline,
        "bubble": line.span - line.busy[worst] - pipeline, "host": host, "jitter": jitter,
    }


def exchanges_of(case: Case, chunks: Sequence[Cost]) -> Exchanges | None:
    """Return the exchanges of rows in the passes of chunks of these costs; None: experts are not divided."""
    if case.ep == 1:
        return None
    fills = case.engine.expert_overlap == "shared"  # what this program's engine does
    return Exchanges([c.fillable if fills else 0.0 for c in chunks], [c.backward_exchange for c in chunks])


@lru_cache(maxsize=256)
def slowest_of(devices: int) -> float:
    """Expected largest of so many standard normal values (Blom's approximation, within 0.01 of the integral)."""
    return NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25)) if devices > 1 else 0.0


def summary(case: Case, machine: Machine, split: Split, line: Timeline) -> StepPlan:
    """Rates from seconds. Samples are those asked for: what fractional accumulation adds is not counted as work."""
    seconds, peak = split.total, machine.cluster.peak_tflops * (2 if case.dtype == "fp8" else 1)
    each = case.global_batch / seconds / case.world / 1e12
    model = model_flops(case.model, case.fine_tuning, case.document) * each
    recompute = "none" if case.recompute == "selective" and case.flash else case.recompute
    recompute = "none" if recompute == "experts" else recompute  # of other programs: not counted among hardware FLOPs
    executed = hardware_flops(
        case.model, recompute, case.tp, case.dropped, case.fine_tuning, case.document, chunked_head=case.head_chunk > 0
    )
    hardware = executed * each
    return StepPlan(
        split=split, seconds=seconds, samples=case.global_batch, model_tflops=model, hardware_tflops=hardware,
        causal_tflops=causal_flops(case.model, case.fine_tuning, case.document) * each,
        mfu=model / peak, hfu=hardware / peak,
        tokens_per_second=case.global_batch * case.model.seq_length / seconds, timeline=line,
    )


def data_seconds(case: Case, links: Links, chunks: Sequence[Cost]) -> float:
    """Exposed seconds of summing gradients over replicas and of gathering weights, on the stage that holds most."""
    e, tied = case.engine, 0.0
    if case.grid.last_stage != 0 and model_spec(case.model).embedding.word.tied:
        table = case.padded_vocab / case.tp * case.model.hidden_size * e.reduce_bytes
        tied = links.collective(table, span(links.machine, 2, case.tp * case.dp * case.cp * (case.pp - 1)))
    if spanning := max(spanning_elements(case, stage) for stage in range(case.pp)):
        size = spanning / case.shards * e.reduce_bytes
        tied += links.collective(size, span(links.machine, case.pp, case.tp * case.dp * case.cp))
    if case.dp * case.cp == 1 and case.expert_sums == 1:
        return tied
    worst, share = 0.0, _hidden_shares(case, links)
    for stage in {0, case.pp // 2, case.pp - 1}:
        n, experts = trained_elements(case, stage), expert_elements(case, stage)
        pieces = _collectives(case, stage)
        moved = _replica_seconds(case, links, n - experts, pieces)
        if experts:
            moved = [a + b for a, b in zip(moved, _expert_replica_seconds(case, links, experts, pieces))]
        gathers, mine = gathered_elements(case, stage) / n, case.of_stage(chunks, stage)
        if case.weight_gathers > 1 and case.shards > 1:
            worst = max(worst, _exposed_by_pass(case, stage, moved, mine, gathers, share))
        else:
            free = [_with_free_links(case, links, c) for c in mine]
            worst = max(worst, _exposed_once(case, stage, moved, free, gathers, share))
    return worst + tied


def _hidden_shares(case: Case, links: Links) -> tuple[float, float]:
    """Shares of reductions and of gathers that passes beside them hide of what they could."""
    layer = trained_elements(case, 0) / _collectives(case, 0)
    group = span(links.machine, case.shards if case.shards > 1 else case.dp * case.cp, case.tp)
    kind = "reduce-scatter" if case.engine.shard_reduces and case.shards > 1 else "all-reduce"
    return (
        links.overlap_share(kind, layer * case.engine.reduce_bytes, group),
        links.overlap_share("all-gather", layer * case.width, group),
    )


def _with_free_links(case: Case, links: Links, cost: Cost) -> Cost:
    """A chunk's passes without what they send between nodes themselves: an adapter carries one byte at a time."""
    far = case.ep > 1 and span(links.machine, case.ep, case.etp).nodes > 1
    apart = case.cp > 1 and span(links.machine, case.cp, case.tp).nodes > 1
    return replace(
        cost,
        forward_exchange=0.0 if far else cost.forward_exchange, forward_context=0.0 if apart else cost.forward_context,
        backward_exchange=0.0 if far else cost.backward_exchange,
        backward_context=0.0 if apart else cost.backward_context,
    )


def _exposed_once(
    case: Case, stage: int, moved: list[float], chunks: Sequence[Cost], gathers: float, share: tuple[float, float]
) -> float:
    """Return the exposed seconds of a step's reduction (one per micro-batch where sums are sharded) and its gathers.

    ``share``: ``Links.overlap_share`` of each.
    """
    e, (reduce_, gather, beyond) = case.engine, moved
    # The last chunk's traffic cannot start before its backward ends, nor the first forward before its weights.
    shown = 1 / max(case.vp, case.chunks[stage])
    hide_reduce = share[0] * min(reduce_ * (1 - shown), e.reduce_overlap * sum(c.passes[1] for c in chunks))
    times = case.micro_batches if case.shards_sums and case.shards > 1 else 1  # no whole sums to wait with
    hide_gather = share[1] * min(gather * (1 - shown), e.gather_overlap * sum(c.passes[0] for c in chunks))
    return times * (reduce_ - hide_reduce) + beyond + gathers * (gather - hide_gather)


def _exposed_by_pass(
    case: Case, stage: int, moved: list[float], chunks: Sequence[Cost], gathers: float, share: tuple[float, float]
) -> float:
    """Return the exposed seconds where every pass gathers the weights anew (ZeRO-3).

    A backward pass gathers and reduces through the same links, one after the other, and neither runs beside the
    exchanges of the pass itself.
    """
    e, m, (reduce_, gather, beyond) = case.engine, case.micro_batches, moved
    shown, late_share, again = 1 / max(case.vp, case.chunks[stage]), *case.engine.late_gathers(case)
    each = gather * gathers / (2 * m)
    free = [
        sum(c.passes[0] - c.forward_exchange - c.forward_context for c in chunks),
        sum(c.passes[1] - c.backward_exchange - c.backward_context for c in chunks),
    ]
    per_pass, late = reduce_ if case.shards_sums else 0.0, each * late_share
    sent = each - late
    forward = late + sent - share[1] * min(sent * (1 - shown), e.gather_overlap * free[0])
    each, late = each * again, late * again
    sent = each - late + per_pass
    mean = (share[1] * (each - late) + share[0] * per_pass) / max(sent, 1e-12)
    backward = late + sent - mean * min(sent * (1 - shown), e.reduce_overlap * free[1])
    last = 0.0 if case.shards_sums else reduce_ - share[0] * min(reduce_ * (1 - shown), e.reduce_overlap * free[1])
    return m * (forward + backward) + last + beyond


def _collectives(case: Case, stage: int) -> int:
    """Collectives in which a pass gathers a stage's weights under ZeRO-3: as a rule one a layer."""
    layers = sum(stop - start for start, stop in case.of_stage(case.layer_ranges, stage))
    each = case.engine.gathers(model_spec(case.model).layers[-1])
    return max(layers * each, 1) if case.weight_gathers > 1 else 1


def _replica_seconds(case: Case, links: Links, n: int, pieces: int = 1) -> list[float]:
    """Seconds of summing the gradients of so many elements over replicas, of gathering their weights, and of the sums
    over shard groups, which come after the last reduction, so that nothing hides them. ``pieces``: collectives that
    the first two are made in, each with its own hops."""
    replicas, shards, e = case.dp * case.cp, case.shards, case.engine
    group = span(links.machine, shards if shards > 1 else replicas, case.tp)
    copies = span(links.machine, case.shard_copies, case.tp * shards)
    kind = "reduce-scatter" if e.shard_reduces and shards > 1 else "all-reduce"
    gather = pieces * links.collective(n / pieces * case.width, group, kind="all-gather") if shards > 1 else 0.0
    return [
        pieces * links.collective(n / pieces * e.reduce_bytes, group, kind=kind), gather,
        links.collective(n / shards * case.wide, copies),
    ]


def _expert_replica_seconds(case: Case, links: Links, n: int, pieces: int = 1) -> list[float]:
    """Return the seconds for experts, over the ranks that hold the same ones; those of tensor parallelism sum last."""
    e, apart = case.engine, max(case.ep * case.etp, case.tp)
    shards = case.expert_shards
    group = span(links.machine, shards if case.shards > 1 else case.expert_replicas, apart)
    copies = span(links.machine, case.expert_copies, apart * shards)
    kind = "half" if e.shard_reduces and case.shards > 1 else "all-reduce"
    gather = pieces * links.collective(n / pieces * case.width, group, kind="half") if case.shards > 1 else 0.0
    alike = span(links.machine, case.expert_sums, case.ep * case.etp)
    beyond = links.collective(n / shards * case.wide, copies) + links.collective(n / shards * case.wide, alike)
    return [pieces * links.collective(n / pieces * e.reduce_bytes, group, kind=kind), gather, beyond]


def optimizer_seconds(case: Case, rates: Rates) -> float:
    """Norm and check of all gradients, the update of this rank's share, gradients cleared; bound by memory.

    The update reads gradient, master and state in full width, writes the last two, and writes the weight. The native
    engine's own kernel does so in one pass, and there a matrix's first gradient is written over the last step's sum;
    others convert, unscale and clear in passes of their own. A table's rates are of the latter's bytes.
    """
    stages = {0, case.pp // 2, case.pp - 1}
    n = max(trained_elements(case, stage) for stage in stages)
    elements = 1 + 2 * (1 + case.rule.state)
    update = max(updated_elements(case, stage) for stage in stages)
    update *= elements * case.wide + case.width
    one_pass = case.kernels == "own" and case.engine.fused_update and not rates.measured("update", case.pass_dtype)
    if one_pass:
        return rates.stream(update + n * case.engine.gradient_bytes, 20)
    extra = max(updated_elements(case, stage) for stage in stages) * case.engine.update_extra_bytes
    return rates.passes({"update": update + extra + n * 2 * case.engine.gradient_bytes}, 20, case.pass_dtype)
