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
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, product
from typing import Any

from megatron_port.core.config.checks import problems
from megatron_port.core.config.choices import CHOICES
from megatron_port.core.config.layout import divisors, with_values
from megatron_port.core.config.schema import RunConfig
from megatron_port.tools.plan.activation_plan import plan_activations
from megatron_port.tools.plan.case import Case, Machine, case_of
from megatron_port.tools.plan.chunk import chunk_bytes
from megatron_port.tools.plan.ledger import chunk_ends
from megatron_port.tools.plan.memory import held_bytes, plan_memory, stage_memory
from megatron_port.tools.plan.offload import host_problem
from megatron_port.tools.plan.refine import refined
from megatron_port.tools.plan.search import (
    FINALISTS,
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
from megatron_port.tools.plan.step import pass_seconds, plan_step

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
        **NEUTRAL, **dp, "offload.optimizer": "none", "offload.weights": "none", "offload.nvme_path": "",
        "layout.shard_size": 0, "layout.reshard": "forward", "layout.pipeline_schedule": "1f1b",
        "layout.zero_stage": 1, "activations.policy": "none", "activations.layers": (), "activations.budget": 0.0,
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
