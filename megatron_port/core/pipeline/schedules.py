"""Pipeline schedules as data: for each stage, the order of its passes.

A schedule says only what a stage computes and when; sends and receives follow
from it (a forward pass needs the output of the chunk before it, a backward pass
the gradient from the chunk after it). The runner, the checker, the simulator,
the planner and the trace read the same lists.

| name | passes | held at most, in micro-batches of a whole stage | bubble, F = I = W |
|---|---|---|---|
| ``gpipe`` (arXiv 1811.06965) | all forwards, all backwards | m | (p - 1) / m |
| ``1f1b`` (arXiv 2104.04473) | one forward, one backward | p - s | (p - 1) / m |
| ``1f1b``, v chunks a stage (the same) | interleaved: the same, chunk after chunk | more than 1f1b | (p - 1) / (m v) |
| ``zb-h1`` (arXiv 2401.10241) | gradients of inputs first, of weights in the gaps | p | (p - 1) / (3 m) |
| ``zb-v`` (the same) | the same on a folded pipeline, two chunks a stage | p | (p - 1) / (6 m) |

Where experts are divided over ranks, weight passes of ``zb-h1`` fill exchanges (``pipeline.schedules``).

torch.distributed.pipelining has schedules of these names too; why they are not used: benchmarks/evidence/decisions.md.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_port.core.dist.mesh import Topology
from megatron_port.core.errors import ConfigError
from megatron_port.core.pipeline.actions import Action, Kind, Schedule, peak_in_flight
from megatron_port.core.pipeline.simulate import simulate
from megatron_port.core.registry import SCHEDULES

# Zero-bubble schedules (Qi et al., arXiv 2401.10241), by list scheduling with unit costs and a memory limit.
#
# At each tick every stage takes the best pass that is ready:
#
# * ``zb-h1``: a forward, else a gradient of an input, else one of weights; at most p - s micro-batches between forward
#   and INPUT (1F1B's), at most p between forward and WEIGHT (1F1B's on stage 0).
# * ``zb-v``: gradients of inputs first (chunk 0 before chunk 1), then forwards (chunk 1 before chunk 0), then weights;
#   at most 2p chunks held, p micro-batches of a whole stage.
#
# With equal costs a step of m ≥ p micro-batches then takes 3m + p - 1 ticks under zb-h1, which is the least: the last
# stage cannot start before tick p - 1. Under zb-v it is 6m + p - 1 ticks of half a stage for p up to 4 and for p 8 from
# m = 2p on, and at most p / 2 + 1 ticks more for others (tests/unit/test_pipeline_schedules.py).

_H1 = ((Kind.FORWARD, 0), (Kind.INPUT, 0), (Kind.WEIGHT, 0))
_V = (
    (Kind.INPUT, 0), (Kind.INPUT, 1), (Kind.FORWARD, 1), (Kind.FORWARD, 0), (Kind.WEIGHT, 1), (Kind.WEIGHT, 0),
)


def list_schedule(grid: Topology, micro_batches: int) -> list[list[Action]]:
    """The plan of each stage; ``grid.folded`` says whether it is zb-v or zb-h1."""
    total, last = grid.virtual_stages, grid.virtual_stages - 1
    # Passes done on each chunk of the model: those of one kind go through the micro-batches in order.
    forward, inputs, weights = [0] * total, [0] * total, [0] * total
    done = {Kind.FORWARD: forward, Kind.INPUT: inputs, Kind.WEIGHT: weights}
    actions = {(k, c): [Action(k, m, c) for m in range(micro_batches)] for k in done for c in range(grid.vp)}
    # By stage: what it may take, best first, as (kind, virtual stage, how many are done, its actions).
    choices = [
        [(kind, grid.virtual_stage(s, c), done[kind], actions[kind, c]) for kind, c in (_V if grid.folded else _H1)]
        for s in range(grid.pp)
    ]
    waiting, held = [0] * grid.pp, [0] * grid.pp  # (micro-batch, chunk) pairs from FORWARD to INPUT, and to WEIGHT
    most = grid.vp * grid.pp
    plans: list[list[Action]] = [[] for _ in range(grid.pp)]
    left = 3 * micro_batches * total
    while left:
        chosen = []
        for stage, mine in enumerate(choices):
            full = held[stage] >= most or (not grid.folded and waiting[stage] >= grid.pp - stage)
            for kind, virtual, passed, passes in mine:
                number = passed[virtual]
                if number >= micro_batches:
                    continue
                if kind is Kind.FORWARD:
                    ready = not full and (virtual == 0 or forward[virtual - 1] > number)
                elif kind is Kind.WEIGHT:
                    ready = inputs[virtual] > number
                else:
                    ready = forward[virtual] > number and (virtual == last or inputs[virtual + 1] > number)
                if ready:
                    chosen.append((stage, kind, virtual, passed, passes))
                    break
        if not chosen:
            raise ValueError(f"no pass is ready with {left} left: {grid}, {micro_batches} micro-batches")
        # Results count from the next tick on.
        for stage, kind, virtual, passed, passes in chosen:
            plans[stage].append(passes[passed[virtual]])
            passed[virtual] += 1
            waiting[stage] += (kind is Kind.FORWARD) - (kind is Kind.INPUT)
            held[stage] += (kind is Kind.FORWARD) - (kind is Kind.WEIGHT)
        left -= len(chosen)
    return plans


# Weight passes beside the exchanges of rows of a forward pass, where experts are divided over ranks.
#
# A layer of experts sends each token's rows to other ranks and takes the results back. Meanwhile a rank computes
# products
# that need nothing new: those of a weight pass (zero bubble). ``zb-h1`` puts most of its weight passes right before a
# forward pass. Here such a pair changes places, and the weight pass ``fills`` the exchanges of the forward pass:
#
# * Its products are computed while rows are on their way, in their order and in equal parts, one for each exchange; the
#   rest follows in the pass's own turn, when the result of the forward pass has left. So no message leaves later than
#   without it, and a pair takes F + W - min(W, exchanges of F).
# * A forward pass adds to no gradient, so every sum of gradients has the same terms in the same order, bit by bit.
# * The operands of its products are freed one after the other while the forward pass saves its activations, so a stage
#   needs the memory of before (``tests/unit/test_plan_ranks.py``). Where a chunk has no experts, the engine computes
# the
#   products before the forward pass.
#
# Weight passes before an ``INPUT`` keep their place: the end of that pass is what the stage before waits for, and they
# fill the gap until its gradient arrives. So does ``zb-v``, whose two chunks wait for one another in both directions:
# in
# a simulation with F = I = W and exchanges of a quarter to all of that, pairs that change places lengthen its steps by
# up
# to 9 % and shorten those of zb-h1 by 5 to 17 % (``tests/unit/test_pipeline_filling.py``).

def filled(plan: Sequence[Action]) -> list[Action]:
    """Return a stage's plan in which each weight pass right before a forward pass comes after it and fills it."""
    out = list(plan)
    at = 0
    while at + 1 < len(out):
        weight, forward = out[at : at + 2]
        if weight.kind is Kind.WEIGHT and forward.kind is Kind.FORWARD:
            out[at : at + 2] = [forward, replace(weight, fills=True)]
            at += 1
        at += 1
    return out


def fillers(plan: Sequence[Action]) -> dict[Action, Action]:
    """Return, by pass, the weight pass that fills its exchanges."""
    return {host: action for host, action in zip(plan, plan[1:]) if action.fills}


def check_fills(plan: Sequence[Action]) -> None:
    """Check that each pass that fills exchanges is a weight pass right after a forward pass. Where it comes after its
    ``INPUT`` pass, its products are then known before the forward pass.

    Raises:
        ValueError: naming the pass.
    """
    for at, action in enumerate(plan):
        if action.fills and (action.kind is not Kind.WEIGHT or not at or plan[at - 1].kind is not Kind.FORWARD):
            raise ValueError(f"{action} fills no exchange: it must be a weight pass right after a forward pass")


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
# (which
# reports no completion before a wait) as on a GPU's stream, and memory does not depend on how the ranks' times fall.

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


@lru_cache(maxsize=64)
def _ordered(schedule: Schedule) -> tuple[tuple[Message, ...], ...]:
    """The messages of each stage, both kinds, in the order of all."""
    found: list[tuple[float, int, int, Message]] = []
    for stage, spans in enumerate(simulate(schedule)):
        for span in spans:
            after = schedule.after(stage, span.action)
            if after is not None and after[0] != stage:
                message = Message(stage, after[0], after[1])
                found.append((span.end, stage, len(found), message))
    mine: list[list[Message]] = [[] for _ in range(schedule.stages)]
    for _, source, _, message in sorted(found, key=lambda f: f[:3]):
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
    queues = {
        down: [m for m in _ordered(schedule)[stage] if m.downstream is down] for down in (True, False)
    }
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


# Checks of a schedule: every pass once and in order, every message received, no deadlock, bounded memory.
#
# Used by tests on every schedule there is; a new one is checked here before it runs.

def check_passes(schedule: Schedule) -> None:
    """Check that each micro-batch passes forward and backward (whole, or INPUT then WEIGHT) through each chunk once,
    and that weight passes which fill exchanges can.

    Raises:
        ValueError: naming the stage and the pass.
    """
    for stage, plan in enumerate(schedule.plans):
        counts = Counter(plan)
        kinds = {a.kind for a in plan}
        wanted = {Kind.FORWARD, *([Kind.BACKWARD] if Kind.BACKWARD in kinds else [Kind.INPUT, Kind.WEIGHT])}
        all_of = [
            Action(kind, m, c)
            for kind in wanted for m in range(schedule.micro_batches) for c in range(schedule.grid.vp)
        ]
        wrong = [a for a in all_of if counts[a] != 1] or [a for a in counts if a.kind not in wanted]
        if wrong or len(plan) != len(all_of):
            raise ValueError(f"{schedule.name}, stage {stage}: {wrong[0] if wrong else plan} is not there once")
        at = {a: i for i, a in enumerate(plan)}
        for a in all_of:
            first = {Kind.BACKWARD: Kind.FORWARD, Kind.INPUT: Kind.FORWARD, Kind.WEIGHT: Kind.INPUT}.get(a.kind)
            if first is not None and at[Action(first, a.micro_batch, a.chunk)] > at[a]:
                raise ValueError(f"{schedule.name}, stage {stage}: {a} comes before its {first.name.lower()} pass")
        try:
            check_fills(plan)
        except ValueError as error:
            raise ValueError(f"{schedule.name}, stage {stage}: {error}") from None


def check_messages(schedule: Schedule) -> int:
    """Check that all messages arrive without deadlock when sends are not buffered.

    A send ends when its receive has been started, and the operations in each of a stage's two queues (activations and
    gradients) run in order.

    Returns the largest number of receives that a stage has started and not used.

    Raises:
        ValueError: a message is sent or received more than once or never, or all wait for one another.
    """
    stages = range(schedule.stages)
    plans = [turns(schedule, s) for s in stages]
    queues: dict[tuple[int, bool], list[Message]] = {(s, d): [] for s in stages for d in (True, False)}
    done: list[set[Message]] = [set() for _ in stages]
    sent, received = Counter[Message](), Counter[Message]()
    position, posted, unused, most = [0] * schedule.stages, [False] * schedule.stages, [0] * schedule.stages, 0
    moved = True
    while moved:
        moved = False
        for s in stages:
            while position[s] < len(plans[s]):
                turn = plans[s][position[s]]
                if not posted[s]:
                    for message in turn.post:
                        queues[s, message.downstream].append(message)
                        received[message] += 1
                        unused[s] += 1
                    posted[s], most = True, max(most, unused[s])
                if turn.receive is not None and turn.receive not in done[s]:
                    break
                under_way = [m for m in turn.completed_sends if m not in done[m.target]]
                if under_way and schedule.forward_only:  # it waits for them
                    break
                if under_way:
                    raise ValueError(f"{schedule.name}, stage {s}: {under_way[0]} is not taken before {turn.action}")
                unused[s] -= turn.receive is not None
                if turn.send is not None:
                    queues[s, turn.send.downstream].append(turn.send)
                    sent[turn.send] += 1
                position[s], posted[s], moved = position[s] + 1, False, True
        for (s, down), queue in queues.items():
            if queue:
                head = queue[0]
                other = queues[head.target if head.source == s else head.source, down]
                if other and other[0] == head:
                    queue.pop(0)
                    other.pop(0)
                    done[head.target].add(head)
                    moved = True
    if any(p < len(plan) for p, plan in zip(position, plans)) or any(queues.values()):
        waiting = {s: str(plans[s][position[s]].action) for s in stages if position[s] < len(plans[s])}
        raise ValueError(f"{schedule.name} deadlocks in its messages; waiting: {waiting}")
    if sent != received or any(n != 1 for n in sent.values()):
        raise ValueError(f"{schedule.name}: a message is not sent and received exactly once")
    return most


def held_bound(schedule: Schedule, stage: int) -> int:
    """Return the most (micro-batch, chunk) pairs that a stage of the schedule may hold, by its formula.

    Interleaved 1F1B: its warm-up of 2 (p - s - 1) + (v - 1) p passes and one more (arXiv 2104.04473). A plugin's
    schedule has no formula here, and may hold all. Zero bubble: p, and one more where a weight pass fills the exchanges
    of the forward pass before it.
    """
    p, m, v = schedule.stages, schedule.micro_batches, schedule.grid.vp
    if schedule.name == "gpipe" or schedule.name in SCHEDULES.added:
        return m
    if schedule.name == "1f1b":
        return min(p - stage, m) if v == 1 else min(2 * (p - stage - 1) + (v - 1) * p + 1, m * v)
    return min(p + any(action.fills for action in schedule.plans[stage]), m) * v


def check(schedule: Schedule) -> None:
    """Check passes, messages and memory.

    Raises:
        ValueError: saying what is wrong.
    """
    check_passes(schedule)
    check_messages(schedule)
    for stage, plan in enumerate(schedule.plans):
        if peak_in_flight(plan) > held_bound(schedule, stage):
            raise ValueError(
                f"{schedule.name}: stage {stage} holds {peak_in_flight(plan)} micro-batches, more than "
                f"{held_bound(schedule, stage)}"
            )


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


@lru_cache(maxsize=64)
def make_schedule(
    name: str, stages: int, micro_batches: int, chunks: int = 1, *, exchanges: bool = False
) -> Schedule:
    """Return the schedule of a step. Made once per step size; lists of all stages, O(stages × micro-batches).

    ``exchanges``: the passes exchange rows of experts, which weight passes may fill (``pipeline.schedules``).

    Schedules of one chunk a stage are functions (stage, stages, micro-batches) → the stage's actions; those that
    plugins register are checked here (``pipeline.schedules``).

    Raises:
        ValueError: there is no such schedule with so many chunks a stage (``config.checks`` says what there is).
        ConfigError: a plugin's schedule is not right for this many stages and micro-batches.
    """
    if name not in SCHEDULES.names or (name not in ("1f1b", "zb-v") and chunks > 1):
        raise ValueError(f"no schedule {name!r} with {chunks} chunks a stage")
    grid = Topology(pp=stages, vp=chunks, folded=name == "zb-v")
    plans: Sequence[Sequence[Action]]
    if name in ("zb-h1", "zb-v"):
        plans = list_schedule(grid, micro_batches)
    elif chunks > 1:
        plans = [interleaved(s, stages, chunks, micro_batches) for s in range(stages)]
    else:
        actions = SCHEDULES.function(name)
        plans = [actions(s, stages, micro_batches) for s in range(stages)]
    if exchanges and name == "zb-h1":
        plans = [filled(plan) for plan in plans]
    schedule = Schedule(name, grid, micro_batches, tuple(tuple(plan) for plan in plans))
    if name in SCHEDULES.added:
        _check_added(schedule)
    return schedule


def _check_added(schedule: Schedule) -> None:
    """Raise ConfigError where a plugin's schedule would compute something else, or wait for ever."""
    try:
        check(schedule)
    except ValueError as error:
        raise ConfigError(
            f'layout.pipeline_schedule "{schedule.name}", with {schedule.stages} stages and '
            f"{schedule.micro_batches} micro-batches: {error}; correct the plugin's function"
        ) from error
