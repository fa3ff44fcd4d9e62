"""The fastest of all layouts that a run could have on its devices: every axis, engine and schedule, best first.

A branch and bound (A*). A node is a set of layouts with a bound that none of them is faster than, by the closed form of
the pipeline; the node of least bound is taken next. Ranks, micro-batch and interleaving first (bound: what the busiest
stage computes and exchanges), then schedule and recompute (with the bubble), then where state is kept: ZeRO stage,
groups of shards, offload. Recompute, sharding and offload only add to a step, which is what makes the bounds valid.
Layouts come out in the order of their planned seconds, so the search ends with the first few that fit.

Some choices are too many to be enumerated, and are made for what comes out: layers that keep only some of their
activations (``activation_plan``), where keeping all does not fit and recomputing all does; and for the best of them a
split of the layers by seconds, pieces of products and a share of the optimizer (``refine``).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, count, product
from typing import Any

from megatron_port.core.config.checks import problems
from megatron_port.core.config.choices import CHOICES
from megatron_port.core.config.layout import divisors, with_values
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.errors import ConfigError
from megatron_port.core.pipeline.partition import balanced_layers
from megatron_port.ext.memory.settings import chosen_chunk
from megatron_port.tools.plan.activation_plan import plan_activations
from megatron_port.tools.plan.case import Case, Machine, case_of, checked_data
from megatron_port.tools.plan.chunk import chunk_bytes
from megatron_port.tools.plan.ledger import chunk_ends
from megatron_port.tools.plan.memory import StageMemory, held_bytes, host_problem, plan_memory, stage_memory
from megatron_port.tools.plan.search import (
    FINALISTS,
    LEAST_HELD,
    NEUTRAL,
    RECOMPUTE,
    Candidate,
    Options,
    allowed,
    elements_of,
    ends,
    fullest,
    is_legal,
    layouts,
    options_of,
)
from megatron_port.tools.plan.step import StepPlan, pass_seconds, plan_step, unit_seconds

# Choices that are too many to be enumerated, made for layouts that a search has found: each at least as fast.
#
# The layers split by the planned seconds of the units, which no other split has a faster slowest stage than; pieces
# of a product whose collective runs beside the next one; no more of the optimizer off the device than has to be.

STEPS = 20
"""Shares of the optimizer that are told apart: a twentieth."""
PIECES = (2, 4, 8)
"""Values of layout.tp_overlap_chunks."""


def refined(config: RunConfig | None, found: Candidate, machine: Machine) -> Candidate:
    """The layout with each of these choices that makes it faster, fits and is legal (None: legality is not judged)."""
    kinds: tuple[Callable[[Candidate, Machine], Iterator[Case]], ...] = (_splits, _pieces, _shares)
    for cases in kinds:
        now = plan_step(found.case, machine, quick=True).seconds
        tried = sorted(((plan_step(case, machine, quick=True).seconds, i, case) for i, case in
                        enumerate(cases(found, machine))), key=lambda one: one[:2])
        for seconds, _, case in tried:
            if seconds >= now or (config is not None and not is_legal(config, case)):
                continue
            # Pieces of a product hold what the whole does.
            memory = found.memory if cases is _pieces else _memory(case, machine)
            if memory.total <= machine.cluster.memory_gb * 1e9 and not host_problem(case, machine):
                one = Candidate(case=case, step=plan_step(case, machine), memory=memory)
                found = one if one.step.seconds < found.step.seconds else found
                break
    return found


def _memory(case: Case, machine: Machine) -> StageMemory:
    """The fullest stage; of a plan of activations, which no formula orders by stages, all are counted."""
    return max(plan_memory(case, machine), key=lambda m: m.total) if case.dropped else fullest(case, machine)


def _splits(found: Candidate, machine: Machine) -> Iterator[Case]:
    """The layers split by seconds instead of FLOPs. A plan of activations is of one split, and stays."""
    case = found.case
    if case.pp * case.vp > 1 and not case.dropped:
        split = balanced_layers(unit_seconds(case, machine), case.pp * case.vp)
        if split != case.split:
            yield replace(case, split=split)


def _pieces(found: Candidate, machine: Machine) -> Iterator[Case]:
    """A tensor-parallel product in pieces, where the engine and the run's positions allow it."""
    case = found.case
    if case.tp == 1 or case.fine_tuning.enabled or case.dtype == "fp8":
        return
    positions = case.model.seq_length // case.cp // (case.tp if case.sequence_parallel else 1)
    for pieces in (1, *PIECES):
        if pieces != case.tensor_chunks and positions % pieces == 0:
            yield replace(case, tensor_chunks=pieces)


def _shares(found: Candidate, machine: Machine) -> Iterator[Case]:
    """The least share of the optimizer's state off the device with which the layout fits: memory falls with it."""
    case = found.case
    if case.offload == "none" or case.offload_weights or not case.offload_fraction:
        return
    headroom = machine.cluster.memory_gb * 1e9 - found.memory.total
    less = replace(case, offload_fraction=case.offload_fraction / 2)
    more = stage_memory(less, machine, found.memory.stage).total - found.memory.total
    bytes_per_fraction = more / (case.offload_fraction / 2)
    if headroom <= 0 or bytes_per_fraction <= 0:
        return
    least = math.ceil(STEPS * max(case.offload_fraction - headroom / bytes_per_fraction, 1 / STEPS)) / STEPS
    for step in range(3):  # another stage may be the fullest then
        if least + step / STEPS < case.offload_fraction:
            yield replace(case, offload_fraction=least + step / STEPS)


PLANNED = 3
"""Layouts for which a plan of activations is made at the most; one takes as long as hundreds of others."""
REFINED = 8
"""Layouts, of the best, for which ``refine`` looks for more."""


@dataclass(frozen=True)
class State:
    """Placement of weights, gradients and optimizer state."""

    zero_stage: int
    shard: int = 0
    reshard: str = "forward"
    offload: str = "none"
    offload_weights: bool = False

    def of(self, case: Case) -> Case:
        """The layout with its state kept so."""
        return replace(
            case, zero_stage=self.zero_stage, shard=self.shard, reshard=self.reshard, offload=self.offload,
            offload_weights=self.offload_weights,
        )


@dataclass(frozen=True)
class Kind:
    """An engine with what it takes."""

    case: Case
    """The run's, with this engine and nothing that another engine would refuse."""
    options: Options
    zero: tuple[int, ...]
    schedules: tuple[str, ...]
    offloads: tuple[tuple[str, bool], ...]
    plans: bool
    """Layers may keep a part of their activations."""


def kinds_of(config: RunConfig, case: Case, world: int) -> list[Kind]:
    """Each engine that takes the run's model, the run's own first, with the choices that it has."""
    out = []
    dp = {"layout.data_parallel_size": 0, "layout.context_parallel_size": 1}
    bare = with_values(config, {
        **NEUTRAL, **dp, "data": checked_data(config), "offload.optimizer": "none", "offload.weights": "none",
        "offload.nvme_path": "", "layout.shard_size": 0, "layout.reshard": "forward",
        "layout.pipeline_schedule": "1f1b", "layout.zero_stage": 1, "activations.policy": "none",
        "activations.layers": (), "activations.budget": 0.0,
    })
    for name in (config.engine, *(str(e) for e in CHOICES["engine"] if e != config.engine)):
        mine = with_values(bare, {"engine": name})
        if problems(mine, world_size=1):
            continue
        base = replace(
            case_of(mine, 1)[0], dp=world, global_batch=case.global_batch, imbalance=case.imbalance,
            document=case.document,
        )
        zero = tuple(int(z) for z in allowed(mine, "layout.zero_stage", mine))
        options = options_of(mine, base)
        if max(options.chunks) > 1:
            options = replace(options, chunks=tuple(divisors(config.model.num_layers)))
        out.append(Kind(
            case=base, options=replace(options, worlds=(world,), recompute=("none",), zero=(min(zero, key=_first),)),
            zero=tuple(sorted(zero)), offloads=tuple(_offloads(mine)),
            schedules=tuple(str(s) for s in allowed(mine, "layout.pipeline_schedule", mine)),
            plans=not problems(with_values(mine, {"activations.policy": "plan"}), world_size=1),
        ))
    return out


def _first(zero: int) -> int:
    return 0 if zero == 1 else 1 + zero


def _offloads(config: RunConfig) -> Iterator[tuple[str, bool]]:
    """(optimizer on, weights on the host) that the engine takes, keeping all on the device left out."""
    hardware = config.hardware
    if hardware.host_link_gb <= 0 or hardware.host_bandwidth_gb <= 0:
        return
    kinds = [("cpu", False), ("cpu", True)] + ([("nvme", False)] if hardware.nvme_gb else [])
    for where, weights in kinds:
        changed = with_values(config, {
            "offload.optimizer": where, "offload.weights": "cpu" if weights else "none",
            "offload.nvme_path": config.cluster.local_disk if where == "nvme" else "",
            "layout.zero_stage": 3 if weights else 1,
        })
        if not problems(changed, world_size=1):
            yield where, weights


def states_of(kind: Kind, case: Case, machine: Machine) -> list[State]:
    """Ways to keep state on the replicas of ``case``, without those that are others under another name."""
    replicas = case.dp * case.cp
    out = []
    for zero in kind.zero if replicas > 1 else (min(kind.zero, key=_first),):
        reshards = ("forward", "step") if zero == 3 else ("forward",)
        for shard, reshard in product(_shards(case, machine) if zero else (0,), reshards):
            out.append(State(zero, shard, reshard))
    for where, weights in kind.offloads:
        for zero in (z for z in kind.zero if z and (z == 3) >= weights and (replicas > 1 or z == 1)):
            out.append(State(zero, 0, "forward", where, weights))
    return out


def _shards(case: Case, machine: Machine) -> tuple[int, ...]:
    """Sizes of groups of shards: all replicas (0), those within a node, and eight times as many."""
    node = max(machine.cluster.gpus_per_node // (case.tp * case.cp), 1)
    near = {math.gcd(case.dp, size) for size in (node, 8 * node)}
    return (0, *sorted(near - {1, case.dp}))


class _Search:
    """The queue of nodes, and what was found."""

    def __init__(self, config: RunConfig | None, case: Case, machine: Machine) -> None:
        self.config, self.case, self.machine = config, case, machine
        self.limit = machine.cluster.memory_gb * 1e9
        self.queue: list[tuple[float, int, str, tuple[Any, ...]]] = []
        self.order = count()
        self.planned = 0
        self.looked_at = 0
        self.known: set[Case] = set()
        """Layouts that came out, without their state: another state of the same is never faster."""

    def push(self, bound: float, what: str, *values: Any) -> None:
        heapq.heappush(self.queue, (bound, next(self.order), what, values))

    def fill(self, kinds: list[Kind]) -> None:
        """Every division of the ranks, by what its busiest stage computes and exchanges."""
        for kind in kinds:
            for case in layouts(kind.case, replace(kind.options, schedules=kind.schedules)):
                self.looked_at += 1
                self.push(pass_seconds(case, self.machine), "ranks", kind, case)

    def next_fitting(self) -> Candidate | None:
        """The next layout that fits, in the order of planned seconds; None: there is none left."""
        while self.queue:
            _, _, what, values = heapq.heappop(self.queue)
            if what == "ranks":
                self._by_recompute(*values)
            elif what == "state":
                self._by_state(*values)
            elif what == "plans":
                self._plans(*values)
            elif what == "plan":
                self._with_plan(*values)
            elif found := self._fitting(*values):
                return found
        return None

    def _by_recompute(self, kind: Kind, case: Case) -> None:
        """Split by recompute; where not even the least state fits, nothing does."""
        states = states_of(kind, case, self.machine)
        counts = [elements_of(case, stage) for stage in {0, case.pp - 1}]
        sizes = {state: self._held(state.of(case), counts) for state in states}
        states = [state for state in states if sizes[state] <= self.limit]
        if not states:
            return
        least = min(states, key=sizes.__getitem__)
        bounds: dict[str, float] = {}
        fits: dict[str, bool] = {}
        for policy in RECOMPUTE:
            if policy == "selective" and case.flash:
                continue
            again = replace(case, recompute=policy)
            self.looked_at += 1
            bounds[policy] = pass_seconds(again, self.machine)
            fits[policy] = self._fits(least.of(again))
            if fits[policy]:
                self.push(bounds[policy], "state", kind, again, tuple(states))
        if kind.plans and not fits["none"] and fits["full"]:
            bound = bounds["none"] + (bounds["full"] - bounds["none"]) / 3
            self.push(bound, "plans", case, tuple(states))

    def _plans(self, case: Case, states: tuple[State, ...]) -> None:
        for state in states if self.planned < PLANNED else ():
            one, again = state.of(case), replace(state.of(case), recompute="full")
            bound, most = (plan_step(c, self.machine, quick=True).seconds for c in (one, again))
            self.push(bound + (most - bound) / 3, "plan", one, again)

    def _fits(self, case: Case) -> bool:
        """Whether every stage fits; the cheapest that can tell, first."""
        return self._may_fit(case) and all(
            stage_memory(case, self.machine, stage, quick=True).total <= self.limit for stage in ends(case)
        )

    def _may_fit(self, case: Case) -> bool:
        """Whether state, and the activations that every schedule holds on the first stage, leave anything: as many
        micro-batches as there are stages."""
        kept = sum(c.kept - c.logits for c in (chunk_bytes(case, *end) for end in chunk_ends(case, 0)))
        counts = [elements_of(case, stage) for stage in {0, case.pp - 1}]
        held = self._held(case, counts) + kept * min(case.pp, case.micro_batches)
        hardware = self.machine.hardware
        return held * (1 + hardware.fragmentation) + hardware.reserved_gb * 1e9 <= self.limit

    def _by_state(self, kind: Kind, case: Case, states: tuple[State, ...]) -> None:
        for state in states:
            one = state.of(case)
            self.looked_at += 1
            self.push(plan_step(one, self.machine, quick=True).seconds, "layout", kind, one)

    def _held(self, case: Case, counts: list[tuple[int, int, int]]) -> float:
        """Weights, gradients and optimizer state of the fuller end, in bytes."""
        return max(sum(held_bytes(case, *count)) for count in counts)

    def _fitting(self, kind: Kind | None, case: Case) -> Candidate | None:
        """The layout, if it fits and training takes it; otherwise a plan of its activations may."""
        plain = State(1).of(case)
        if plain in self.known:
            return None
        self.looked_at += 1
        memory = fullest(case, self.machine)
        if memory.total > self.limit:
            again = replace(case, recompute="full")
            if kind is not None and kind.plans and case.recompute == "none" and not case.dropped:
                bound, most = (plan_step(c, self.machine, quick=True).seconds for c in (case, again))
                share = min((memory.total - self.limit) / max(memory.activations, 1.0), 1.0)
                self.push(bound + share * (most - bound), "plan", case, again)
            return None
        if host_problem(case, self.machine) or (self.config is not None and not is_legal(self.config, case)):
            return None
        self.known.add(plain)
        return Candidate(case=case, step=plan_step(case, self.machine, quick=True), memory=memory)

    def _with_plan(self, case: Case, again: Case) -> None:
        """Find what each stage's layers keep of their activations, and come back with the seconds of that."""
        if self.planned == PLANNED or not self._fits(again):
            return
        self.planned += 1
        found = replace(case, dropped=plan_activations(case, self.machine, quick=True))
        if any(found.dropped):
            self.push(plan_step(found, self.machine, quick=True).seconds, "layout", None, found)


def fastest(
    config: RunConfig, case: Case, machine: Machine, *, world: int | None = None, finalists: int = FINALISTS,
) -> list[Candidate]:
    """The best layouts of the run on its devices that fit and that training takes, simulated, fastest first.

    ``world``: another number of devices (legality by the run file is not judged then).
    """
    asked = config if world is None else None
    search = _Search(asked, case, machine)
    search.fill(kinds_of(config, case, world or case.world))
    chosen: list[Candidate] = []
    while len(chosen) < finalists:
        candidate = search.next_fitting()
        if candidate is None:
            break
        if chosen and candidate.step.seconds > 1.1 * chosen[0].step.seconds:  # the closed form is within 5 %
            break
        chosen.append(replace(candidate, step=plan_step(candidate.case, machine)))
    chosen = _exactly(sorted(chosen, key=_rank), machine)
    better = [refined(asked, candidate, machine) for candidate in chosen[:REFINED]]
    return sorted([*better, *chosen[REFINED:]], key=_rank)


def _rank(candidate: Candidate) -> tuple[float, float]:
    return candidate.step.seconds, candidate.memory.total


def _exactly(found: list[Candidate], machine: Machine) -> list[Candidate]:
    """The layouts, best first; where the best has a plan of activations, it is the one that training makes."""
    exact: list[Candidate] = []
    while found and found[0].case.dropped and found[0] not in exact:
        case = replace(found[0].case, dropped=plan_activations(found[0].case, machine))
        memory = max(plan_memory(case, machine), key=lambda m: m.total)
        made = Candidate(case=case, step=plan_step(case, machine), memory=memory)
        exact += [made]
        found = sorted([*([made] if made.fits(machine) else []), *found[1:]], key=_rank)
    return found


# Changes that make a run fit: single ones of how state and activations are kept, each with its memory and seconds.
#
# Each way changes one thing on the same devices (or two, where none is enough alone): the recompute policy, the
# micro-batch, ZeRO's stage or the size of its shards, offload, one step more of tensor or pipeline parallelism. What
# remains to be fitted is planned as the run would be, and the cheapest comes first.

Change = dict[str, Any]
"""Leaves of a run file by dotted name."""
POLICIES = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True)
class Way:
    """A change after which a run fits."""

    change: Change
    case: Case
    memory: StageMemory
    """Bytes of the fullest stage."""
    seconds: float
    """Duration of a step."""

    @property
    def flags(self) -> str:
        """The change as ``--set`` options."""
        return " ".join(f"--set {name}={_text(value)}" for name, value in self.change.items())


def ways_to_fit(config: RunConfig, case: Case, machine: Machine, *, count: int = 4) -> list[Way]:
    """Return up to ``count`` changes with which the run fits its devices, fewest seconds per step first; those of two
    changes only where none is enough alone."""
    single = list(_changes(config, case, machine))
    found = _fitting(config, single, machine)
    if not found:
        found = _fitting(config, [a | b for a, b in combinations(single, 2) if not a.keys() & b.keys()], machine)
    return sorted(found, key=lambda way: way.seconds)[:count]


def _changes(config: RunConfig, case: Case, machine: Machine) -> Iterator[Change]:
    """Every single change that saves memory, legal or not."""
    for policy in POLICIES[POLICIES.index(case.recompute) + 1 :] if case.recompute in POLICIES else ():
        if policy != "selective" or not case.flash:
            yield {"activations.policy": policy}
    chunk = chosen_chunk(case.padded_vocab // case.tp, case.width)
    if not case.head_chunk and chunk < case.model.seq_length // case.cp * case.micro_batch:
        yield {"activations.head_chunk": chunk}
    micro = case.micro_batch // 2
    while micro:
        yield {"batch.micro_batch_size": micro}
        micro //= 2
    for stage in range(max(case.zero_stage, 1) + (case.zero_stage > 0), 4):
        yield {"layout.zero_stage": stage}
    if 0 < case.shard < case.dp:
        yield {"layout.shard_size": 0}
    if case.zero_stage == 3 and case.reshard == "step":
        yield {"layout.reshard": "forward"}
    if case.offload == "none":
        shards = {} if case.zero_stage else {"layout.zero_stage": 1}
        yield {"offload.optimizer": "cpu", **shards}
        if machine.hardware.nvme_gb:
            yield {"offload.optimizer": "nvme", "offload.nvme_path": config.cluster.local_disk, **shards}
    if case.tp > 1 and not case.sequence_parallel:
        yield {"layout.sequence_parallel": True}
    if config.model.moe.enabled:
        yield {"layout.expert_parallel_size": 2 * case.ep}
    longer = case.model.seq_length // (2 * case.cp) >= LEAST_HELD
    context = (("context", case.cp),) if longer else ()
    for name, size in (("tensor", case.tp), ("pipeline", case.pp), *context):
        dp = config.layout.data_parallel_size
        halved = {"layout.data_parallel_size": dp // 2} if dp > 1 else {}
        split = {"layout.pipeline_split": ()} if name == "pipeline" and config.layout.pipeline_split else {}
        yield {f"layout.{name}_parallel_size": 2 * size, **halved, **split}


def _fitting(config: RunConfig, changes: list[Change], machine: Machine) -> list[Way]:
    out = []
    for change in changes:
        changed = replace(with_values(config, change), data=checked_data(config))
        try:
            if problems(changed):
                continue
            case, _ = case_of(changed)
        except ConfigError:
            continue
        memory = fullest(case, machine)
        if memory.total <= machine.cluster.memory_gb * 1e9 and not host_problem(case, machine):
            seconds = plan_step(case, machine, quick=True).seconds
            out.append(Way(change=change, case=case, memory=memory, seconds=seconds))
    return out


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "[]" if value == () else str(value)


# Why one layout is better than another: what each change buys, taken one after the other.
#
# From the layout that a user has to the best one there are a few changes: how ranks are divided, the micro-batch,
# what is recomputed, sequence parallelism, the schedule, ZeRO. At each turn the change is made that saves most of
# what is left, and the difference is told by cause. The last line is the better layout itself, so the seconds add up.

GROUPS: dict[str, tuple[str, ...]] = {
    "engine {engine.name}": ("engine",),
    "tp {tp}, pp {pp}, cp {cp}, dp {dp}": ("tp", "pp", "cp", "dp", "vp", "split", "micro_batches", "ep", "cp_method",
                                           "cp_order", "sequence_parallel"),
    "sequence parallelism": ("sequence_parallel",),
    "micro-batch {micro_batch}": ("micro_batch", "micro_batches"),
    "recompute {recompute}": ("recompute", "dropped"),
    "{schedule}": ("schedule",),
    "ZeRO-{zero_stage}": ("zero_stage", "shard", "reshard"),
    "optimizer on {offload}": ("offload", "offload_weights", "offload_fraction"),
    "products in {tensor_chunks} parts": ("tensor_chunks",),
}
"""Name of a change → fields that change together."""


@dataclass(frozen=True)
class Gain:
    """A change, the seconds of a step after it, and what it saved by cause."""

    change: str
    seconds: float
    saved: dict[str, float]

    @property
    def reason(self) -> str:
        """The causes that make up most of it."""
        order = sorted(self.saved.items(), key=lambda item: -abs(item[1]))
        most = max((abs(s) for _, s in order), default=0.0)
        told = [(name, s) for name, s in order if abs(s) >= 0.15 * most and abs(s) > 1e-4]
        return ", ".join(f"{name} {-s:+.3g} s" for name, s in told[:3])


def _told(name: str, case: Case) -> str:
    return "recompute by plan" if case.dropped and name.startswith("recompute") else name.format(**vars(case))


def _changed(case: Case, best: Case, names: tuple[str, ...]) -> Case:
    values = {name: getattr(best, name) for name in names}
    one = replace(case, **values)
    replicas = one.micro_batch * one.dp
    return replace(one, micro_batches=max(-(-one.global_batch // replicas), 1))


def _legal(case: Case) -> bool:
    even = case.vp == 1 or case.micro_batches % case.pp == 0
    return even and not (case.sequence_parallel and case.tp == 1)


def _gain(change: str, before: StepPlan, after: StepPlan) -> Gain:
    now = after.split.parts()
    return Gain(change, after.seconds, {cause: s - now[cause] for cause, s in before.split.parts().items()})


def gains(case: Case, best: Case, machine: Machine) -> list[Gain]:
    """The changes from ``case`` to ``best`` in the order of what they save."""
    now, out = case, []
    step = plan_step(now, machine)
    open_groups = {
        name: fields for name, fields in GROUPS.items() if any(getattr(case, f) != getattr(best, f) for f in fields[:5])
    }
    while open_groups:
        names = [n for n in open_groups if n.startswith("engine")] or list(open_groups)  # what has it, depends on it
        tried: list[tuple[float, str, Case]] = []
        for name in names:
            one = best if len(open_groups) == 1 else _changed(now, best, open_groups[name])
            if one != now and _legal(one):
                tried.append((plan_step(one, machine, quick=True).seconds, name, one))
        if not tried:
            break
        _, name, one = min(tried, key=lambda t: t[0])
        found = plan_step(one, machine)
        out.append(_gain(_told(name, one), step, found))
        now, step = one, found
        del open_groups[name]
        open_groups = {n: f for n, f in open_groups.items() if any(getattr(now, x) != getattr(best, x) for x in f[:5])}
    if now != best:
        found = plan_step(best, machine)
        if abs(found.seconds - step.seconds) > 1e-6 * step.seconds:
            out.append(_gain("the rest", step, found))
    return out
