"""Actions and schedules: passes of micro-batches through chunks, in an order for each stage."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Protocol, runtime_checkable

from megatron_port.core.dist.mesh import Topology
from megatron_port.core.registry import PARTS, SCHEDULES


class Kind(Enum):
    """Kind of computation that an action is."""

    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of the input and of the weights."""
    INPUT = "I"
    """Backward pass of the input alone (and of what is cheap: biases, norms)."""
    WEIGHT = "W"
    """Backward pass of the linears' weights alone, after ``INPUT``."""


@dataclass(frozen=True)
class Action:
    """One pass of one micro-batch through one chunk of a stage."""

    kind: Kind
    micro_batch: int
    chunk: int = 0
    fills: bool = field(default=False, compare=False)
    """WEIGHT only: its products are computed while the pass before it exchanges rows of experts, and after that pass
    those that are left (``pipeline.zero_bubble``)."""

    def __str__(self) -> str:
        chunk = f".{self.chunk}" if self.chunk else ""
        return f"{self.kind.value}{self.micro_batch}{chunk}" + ("+" if self.fills else "")


@dataclass(frozen=True)
class Span:
    """A pass with its start and end, in the unit of the costs."""

    action: Action
    start: float
    end: float
    beside: float = 0.0
    """Seconds of a weight pass that ran before ``start``, beside the exchanges that it fills."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """The passes of every stage of a pipeline, for one step.

    Made once and compared by identity: results derived from it are looked up every step, and hashing a hundred thousand
    passes would cost more than deriving them."""

    name: str
    grid: Topology
    """Only ``pp``, ``vp`` and ``folded`` count: which chunk of the model lies where."""
    micro_batches: int
    plans: tuple[tuple[Action, ...], ...]
    """By stage."""

    @property
    def stages(self) -> int:
        """Number of stages, p."""
        return self.grid.pp

    @property
    def forward_only(self) -> bool:
        """Whether it is an evaluation, without backward passes."""
        return all(action.kind is Kind.FORWARD for action in self.plans[0])

    @property
    def splits_backward(self) -> bool:
        """Whether some backward passes leave the weight gradients to separate passes."""
        return any(action.kind is Kind.WEIGHT for action in self.plans[0])

    def before(self, stage: int, action: Action) -> tuple[int, Action] | None:
        """Return the (stage, action) in another chunk of the model whose result ``action`` takes, or None."""
        if action.kind is Kind.WEIGHT:
            return None
        virtual = self.grid.virtual_stage(stage, action.chunk) + (-1 if action.kind is Kind.FORWARD else 1)
        if not 0 <= virtual < self.grid.virtual_stages:
            return None
        other, chunk = self.grid.holder(virtual)
        return other, Action(action.kind, action.micro_batch, chunk)

    def after(self, stage: int, action: Action) -> tuple[int, Action] | None:
        """Return the (stage, action) in another chunk of the model that takes the result of ``action``, or None."""
        if action.kind is Kind.WEIGHT:
            return None
        virtual = self.grid.virtual_stage(stage, action.chunk) + (1 if action.kind is Kind.FORWARD else -1)
        if not 0 <= virtual < self.grid.virtual_stages:
            return None
        other, chunk = self.grid.holder(virtual)
        return other, Action(action.kind, action.micro_batch, chunk)


def most_held(actions: Sequence[Action]) -> dict[int, int]:
    """Return how many micro-batches at most are between the forward and the backward pass of each chunk of a stage."""
    held: dict[int, int] = {}
    most: dict[int, int] = {}
    for action in actions:
        if action.kind is not Kind.WEIGHT:
            held[action.chunk] = held.get(action.chunk, 0) + (1 if action.kind is Kind.FORWARD else -1)
            most[action.chunk] = max(most.get(action.chunk, 0), held[action.chunk])
    return most


# Pipeline schedules as data: for each stage, the order of its passes.
#
# A schedule says only what a stage computes and when; sends and receives follow
# from it (a forward pass needs the output of the chunk before it, a backward pass
# the gradient from the chunk after it). The runner, the checker, the simulator,
# the planner and the trace read the same lists.
#
# | name | passes | held at most, in micro-batches of a whole stage | bubble, F = I = W |
# |---|---|---|---|
# | ``gpipe`` (arXiv 1811.06965) | all forwards, all backwards | m | (p - 1) / m |
# | ``1f1b`` (arXiv 2104.04473) | one forward, one backward | p - s | (p - 1) / m |
# | ``1f1b``, v chunks a stage (the same) | interleaved: the same, chunk after chunk | more than 1f1b | (p - 1) / (m v)
# |
# | ``zb-h1`` (arXiv 2401.10241) | gradients of inputs first, of weights in the gaps | p | (p - 1) / (3 m) |
# | ``zb-v`` (the same) | the same on a folded pipeline, two chunks a stage | p | (p - 1) / (6 m) |
#
# Where experts are divided over ranks, weight passes of ``zb-h1`` fill exchanges (``pipeline.zero_bubble``).
#
# torch.distributed.pipelining has schedules of these names too; why they are not used:
# benchmarks/evidence/decisions.md.

def fillers(plan: Sequence[Action]) -> dict[Action, Action]:
    """Return, by pass, the weight pass that fills its exchanges."""
    return {host: action for host, action in zip(plan, plan[1:]) if action.fills}


# Which messages a stage sends and receives, and in which order: worked out once for a schedule, on every stage alike.
#
# All messages of a step have one order (by the end of the pass that makes them, in a simulation with unit costs), and
# each stage starts its sends and receives in that order, in one queue for activations and one for gradients. The first
# message in the order that is not done yet is then at the head of both its stages' queues, whatever the real
# times are, so there is no deadlock: not with interleaving, where the last stage sends to the first, and not
# where a communicator runs its operations strictly one after the other and a send waits for its receive (NCCL).
#
# Receives are started ahead of the pass that needs them, at most ``AHEAD`` of each queue beyond what the order asks
# for.
#
# A send's payload can be freed as soon as its receiver has it, and the schedule says when that is known: what arrives
# from a stage was made after that stage took its earlier inputs. Waiting for such a send costs nothing, under gloo
# (which reports no completion before a wait) as on a GPU's stream, and memory does not depend on how the ranks' times
# fall.

AHEAD = 1
UNTAKEN = 2
"""Sends of an evaluation that may be under way: nothing comes back that tells that they were taken."""


@dataclass(frozen=True)
class Message:
    """Message with the result of a pass, to the stage that needs it."""

    source: int
    target: int
    action: Action
    """The pass on ``target`` that needs it."""

    @property
    def downstream(self) -> bool:
        """Whether it is an activation; otherwise a gradient."""
        return self.action.kind is Kind.FORWARD


@dataclass(frozen=True)
class Turn:
    """One pass of a stage, with the transfers before and after it."""

    action: Action
    post: tuple[Message, ...]
    """Receives to start before the pass, in order."""
    receive: Message | None
    """Receive that the pass waits for; started in this turn or before."""
    send: Message | None
    """To start after the pass."""
    keep: Action | None
    """The pass on this same stage that needs the result instead."""
    completed_sends: tuple[Message, ...]
    """Earlier sends of this stage that were taken before ``receive`` was made; their payloads can be freed. Forward
    passes only: the sends before the last ``UNTAKEN``, which the stage waits for."""


_UNITS = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.INPUT: 1, Kind.WEIGHT: 1}
_KINDS = tuple(_UNITS)
_FOLLOWS = {1: 0, 2: 0, 3: 2}
"""A backward pass or its first half follows the forward pass on its own chunk, the second half the first."""


def in_order(schedule: Schedule) -> list[tuple[int, Action]]:
    """Return all passes of a schedule with their stages, each after what it waits for.

    Raises:
        ValueError: the schedule deadlocks (an action waits for one that never ends), or a pass comes before the one
            on the same chunk that it follows.
    """
    grid, total, number = schedule.grid, schedule.grid.virtual_stages, {kind: i for i, kind in enumerate(_KINDS)}
    found: list[tuple[int, Action]] = []
    done: set[tuple[int, int, int]] = set()  # (kind, virtual stage, micro-batch)
    position = [0] * len(schedule.plans)
    sweep = list(enumerate(schedule.plans))
    progress = True
    while progress:
        progress = False
        sweep.reverse()  # activations go one way, gradients the other
        for s, plan in sweep:
            first = position[s]
            while position[s] < len(plan):
                action = plan[position[s]]
                kind, virtual, micro = number[action.kind], grid.virtual_stage(s, action.chunk), action.micro_batch
                before = virtual - 1 if kind == 0 else virtual + 1
                if kind != 3 and 0 <= before < total and (kind, before, micro) not in done:
                    break
                own = _FOLLOWS.get(kind)
                if own is not None and (own, virtual, micro) not in done:
                    name = _KINDS[own].name.lower()
                    raise ValueError(f"{schedule.name}: {action} on stage {s} before its {name} pass")
                done.add((kind, virtual, micro))
                found.append((s, action))
                position[s] += 1
            progress = progress or position[s] > first
    if any(at < len(plan) for at, plan in zip(position, schedule.plans)):
        waiting = {s: str(plan[at]) for s, (at, plan) in enumerate(zip(position, schedule.plans)) if at < len(plan)}
        raise ValueError(
            f"{schedule.name} deadlocks with {schedule.stages} stages and {schedule.micro_batches} micro-batches; "
            f"waiting: {waiting}"
        )
    return found


@lru_cache(maxsize=64)
def _ordered(schedule: Schedule) -> tuple[tuple[Message, ...], ...]:
    """The messages of each stage, both kinds, in the order of all."""
    found: list[tuple[int, int, Message]] = []
    clock = [0] * schedule.stages
    ends: dict[tuple[int, Action], int] = {}
    for stage, action in in_order(schedule):
        before, after = schedule.before(stage, action), schedule.after(stage, action)
        start = clock[stage] if before is None else max(clock[stage], ends[before])
        ends[stage, action] = clock[stage] = start + _UNITS[action.kind]
        if after is not None and after[0] != stage:
            found.append((clock[stage], stage, Message(stage, after[0], after[1])))
    mine: list[list[Message]] = [[] for _ in range(schedule.stages)]
    for _, source, message in sorted(found, key=lambda f: f[:2]):  # of a stage, in the order of its passes
        mine[source].append(message)
        mine[message.target].append(message)
    return tuple(tuple(m) for m in mine)


@lru_cache(maxsize=4)
def _places(schedule: Schedule) -> list[dict[Action, int]]:
    """Return the index of each pass in its stage's plan."""
    return [{action: place for place, action in enumerate(plan)} for plan in schedule.plans]


def _completed_sends(schedule: Schedule, stage: int) -> list[tuple[Message, ...]]:
    """``Turn.completed_sends`` of each pass."""
    places, forward_only = _places(schedule), schedule.forward_only
    sent: dict[int, deque[Message]] = {}
    out = []
    for action in schedule.plans[stage]:
        before, after = schedule.before(stage, action), schedule.after(stage, action)
        taken: list[Message] = []
        if forward_only:
            taken = [queue.popleft() for queue in sent.values() for _ in range(len(queue) - UNTAKEN)]
        elif before is not None and before[0] in sent:
            source, made_by = before
            queue = sent[source]
            taken = [m for m in queue if places[source][m.action] <= places[source][made_by]]
            for message in taken:
                queue.remove(message)
        if after is not None and after[0] != stage:
            sent.setdefault(after[0], deque()).append(Message(stage, after[0], after[1]))
        out.append(tuple(taken))
    return out


@lru_cache(maxsize=64)
def turns(schedule: Schedule, stage: int) -> tuple[Turn, ...]:
    """Return the turns of a stage in a step, in order."""
    queues = {down: [m for m in _ordered(schedule)[stage] if m.downstream is down] for down in (True, False)}
    places = {message: i for queue in queues.values() for i, message in enumerate(queue)}
    at = {True: 0, False: 0}
    waiting: dict[bool, int] = {True: 0, False: 0}

    def through(message: Message) -> list[Message]:
        """Receives up to (and with) a message that are not started yet. None of its queue before it is a send left."""
        queue, first, last = queues[message.downstream], at[message.downstream], places[message]
        at[message.downstream] = last + 1
        passed = queue[first : last + 1]
        if any(m.source == stage for m in passed[:-1]):
            raise ValueError(f"{schedule.name}: {message} on stage {stage} comes before a send that it must follow")
        return [m for m in passed if m.target == stage]

    out = []
    for action, completed_sends in zip(schedule.plans[stage], _completed_sends(schedule, stage), strict=True):
        post: list[Message] = []
        receive = send = keep = None
        before, after = schedule.before(stage, action), schedule.after(stage, action)
        if before is not None and before[0] != stage:
            receive = Message(before[0], stage, action)
            if places[receive] >= at[receive.downstream]:
                post += through(receive)
        if after is not None and after[0] == stage:
            keep = after[1]
        elif after is not None:
            send = Message(stage, after[0], after[1])
            post += through(send)
        for message in post:
            waiting[message.downstream] += 1
        if receive is not None:
            waiting[receive.downstream] -= 1
        for down, queue in queues.items():
            # A send that is due in this turn comes first: nothing behind it may be started before the pass.
            if send is not None and send.downstream is down:
                continue
            while waiting[down] < AHEAD and at[down] < len(queue) and queue[at[down]].target == stage:
                post.append(queue[at[down]])
                at[down] += 1
                waiting[down] += 1
        out.append(Turn(action, tuple(post), receive, send, keep, completed_sends))
    return tuple(out)


@lru_cache(maxsize=64)
def _passes(kind: Kind, micro_batches: int, chunk: int = 0) -> tuple[Action, ...]:
    """Return one pass per micro-batch; the stages share these objects."""
    return tuple(Action(kind, m, chunk) for m in range(micro_batches))


def gpipe(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """GPipe: all forward passes, then all backward passes; every micro-batch is held at once."""
    return [*_passes(Kind.FORWARD, micro_batches), *_passes(Kind.BACKWARD, micro_batches)]


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """1F1B (PipeDream-Flush): at most ``stages - stage`` micro-batches held.

    Fewer micro-batches than stages are allowed; the warm-up is then cut short.
    """
    warmup = min(stages - stage - 1, micro_batches)
    forwards, backwards = _passes(Kind.FORWARD, micro_batches), _passes(Kind.BACKWARD, micro_batches)
    actions = list(forwards[:warmup])
    for pair in zip(forwards[warmup:], backwards):
        actions += pair
    return actions + list(backwards[micro_batches - warmup :])


def _by_groups(stages: int, chunks: int, micro_batches: int) -> list[tuple[int, int]]:
    """(chunk, micro-batch) in the order of interleaving: groups of ``stages`` go through chunk after chunk.

    The last group may be smaller, so the number of micro-batches need not divide evenly.
    """
    return [
        (chunk, m)
        for first in range(0, micro_batches, stages)
        for chunk in range(chunks)
        for m in range(first, min(first + stages, micro_batches))
    ]


def interleaved(stage: int, stages: int, chunks: int, micro_batches: int, group: int = 0) -> list[Action]:
    """Interleaved 1F1B (Narayanan et al., arXiv 2104.04473).

    Where the stages do not divide the micro-batches, it is the schedule of the next larger number that they divide
    without the passes of the missing micro-batches: no micro-batch waits for another, so the other passes still run.

    ``group``: micro-batches that pass a chunk before the stage's next one is their turn; 0: the stages' number. Others
    are planned for Megatron-core's runs only (``microbatch-group-size-per-virtual-pipeline-stage``).
    """
    group = group or stages
    whole = -(-micro_batches // group) * group
    order = _by_groups(group, chunks, whole)
    forward, backward = ([_passes(kind, whole, c) for c in range(chunks)] for kind in (Kind.FORWARD, Kind.BACKWARD))
    forwards = [forward[c][m] for c, m in order]
    backwards = [backward[chunks - 1 - c][m] for c, m in order]
    warmup = min((stages - stage - 1) * 2 + (chunks - 1) * group, len(order))
    actions = forwards[:warmup]
    for f, b in zip(forwards[warmup:], backwards):
        actions += [f, b]
    actions += backwards[len(order) - warmup :]
    return [a for a in actions if a.micro_batch < micro_batches]


@lru_cache(maxsize=64)
def forward_only(grid: Topology, micro_batches: int) -> Schedule:
    """Schedule of an evaluation: forward passes only."""
    order = tuple(Action(Kind.FORWARD, m, c) for c, m in _by_groups(grid.pp, grid.vp, micro_batches))
    return Schedule("forward", grid, micro_batches, (order,) * grid.pp)


@runtime_checkable
class Filling(Protocol):
    """A schedule whose weight passes may fill exchanges of rows of experts."""

    def filled(self, plan: Sequence[Action]) -> list[Action]:
        """Return a stage's plan in which they do."""


@lru_cache(maxsize=64)
def make_schedule(name: str, stages: int, micro_batches: int, chunks: int = 1, *, exchanges: bool = False) -> Schedule:
    """Return the schedule of a step. Made once per step size; lists of all stages, O(stages × micro-batches).

    ``exchanges``: the passes exchange rows of experts, which weight passes may fill (``pipeline.zero_bubble``).

    Schedules are functions (stage, stages, micro-batches) → the stage's actions; those that plugins register are
    checked (``pipeline.checks``).

    Raises:
        ValueError: there is no such schedule with so many chunks a stage (``config.checks`` says what there is).
        ConfigError: a plugin's schedule is not right for this many stages and micro-batches.
    """
    if name not in SCHEDULES.names or (name not in ("1f1b", "zb-v") and chunks > 1):
        raise ValueError(f"no schedule {name!r} with {chunks} chunks a stage")
    grid = Topology(pp=stages, vp=chunks, folded=name == "zb-v")
    if name == "1f1b" and chunks > 1:
        plans = [interleaved(s, stages, chunks, micro_batches) for s in range(stages)]
    else:
        actions = SCHEDULES.function(name)
        plans = [actions(s, stages, micro_batches) for s in range(stages)]
        if exchanges and isinstance(actions, Filling):
            plans = [actions.filled(plan) for plan in plans]
    schedule = Schedule(name, grid, micro_batches, tuple(tuple(plan) for plan in plans))
    if name in SCHEDULES.added:
        PARTS.function("pipeline schedule check")(schedule)
    return schedule
