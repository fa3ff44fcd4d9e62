"""Checks of a schedule: every pass once and in order, every message received, no deadlock, bounded memory.

Used by tests on every schedule there is; a plugin's is checked before it runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatron_port.core.errors import ConfigError
from megatron_port.core.pipeline.schedules import Action, Kind, Message, Schedule, turns
from megatron_port.core.registry import SCHEDULES


def check_fills(plan: Sequence[Action]) -> None:
    """Check that each pass that fills exchanges is a weight pass right after a forward pass. Where it comes after its
    ``INPUT`` pass, its products are then known before the forward pass.

    Raises:
        ValueError: naming the pass.
    """
    for at, action in enumerate(plan):
        if action.fills and (action.kind is not Kind.WEIGHT or not at or plan[at - 1].kind is not Kind.FORWARD):
            raise ValueError(f"{action} fills no exchange: it must be a weight pass right after a forward pass")


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


def peak_in_flight(actions: Sequence[Action]) -> int:
    """Largest number of (micro-batch, chunk) pairs whose activations a stage holds: from forward to the last part of
    backward."""
    split = any(a.kind is Kind.WEIGHT for a in actions)
    ends = Kind.WEIGHT if split else Kind.BACKWARD
    held = peak = 0
    for action in actions:
        held += (action.kind is Kind.FORWARD) - (action.kind is ends)
        peak = max(peak, held)
    return peak


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


def check_added(schedule: Schedule) -> None:
    """Check a plugin's schedule.

    Raises:
        ConfigError: it would compute something else, or wait for ever.
    """
    try:
        check(schedule)
    except ValueError as error:
        raise ConfigError(
            f'layout.pipeline_schedule "{schedule.name}", with {schedule.stages} stages and '
            f"{schedule.micro_batches} micro-batches: {error}; correct the plugin's function"
        ) from error
