"""Which messages a stage sends and receives, and in which order: worked out once for a schedule, on every stage alike.

All messages of a step have one order (by the end of the pass that makes them, in a simulation with unit costs), and
each stage starts its sends and receives in that order, in one queue for activations and one for gradients. The first
message in the order that is not done yet is then at the head of both its stages' queues, whatever the real
times are, so there is no deadlock: not with interleaving, where the last stage sends to the first, and not
where a communicator runs its operations strictly one after the other and a send waits for its receive (NCCL).

Receives are started ahead of the pass that needs them, at most ``AHEAD`` of each queue beyond what the order asks for.

A send's payload can be freed as soon as its receiver has it, and the schedule says when that is known: what arrives
from a stage was made after that stage took its earlier inputs. Waiting for such a send costs nothing, under gloo (which
reports no completion before a wait) as on a GPU's stream, and memory does not depend on how the ranks' times fall.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache

from megatron_port.core.pipeline.actions import Action, Kind, Schedule
from megatron_port.core.pipeline.simulate import simulate

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
