"""When each pass of a schedule starts and ends, for given costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_port.pipeline.schedules import Action, Kind, Schedule, make_schedule


@dataclass(frozen=True)
class Span:
    """A pass and its time, in the unit of the costs."""

    action: Action
    start: float
    end: float


Cost = Callable[[int, Action], float]
"""(virtual stage, action) → time."""


def unit_cost(forward: float = 1.0, backward: float = 2.0) -> Cost:
    """Equal chunks; the halves of a split backward pass take half of it each."""
    times = {Kind.FORWARD: forward, Kind.BACKWARD: backward, Kind.INPUT: backward / 2, Kind.WEIGHT: backward / 2}
    return lambda virtual, action: times[action.kind]


def simulate(
    schedule: Schedule, cost: Cost | None = None, *, transfer: float = 0.0, hidden: bool = True, duplex: bool = True,
) -> list[list[Span]]:
    """The spans of every stage, in order of its plan; each pass as early as it can be.

    Args:
        cost: default: forward 1, backward 2.
        transfer: time of a message between stages; ``hidden``: it does not hold up its sender.
        duplex: a stage sends and receives at once; else the receiver, too, spends the time of the transfer.

    Raises:
        ValueError: the schedule deadlocks (an action waits for one that never ends), or a pass comes before the one
            on the same chunk that it follows.
    """
    cost = cost or unit_cost()
    grid, plans = schedule.grid, schedule.plans
    done: list[dict[Action, Span]] = [{} for _ in plans]
    clock, position = [0.0] * len(plans), [0] * len(plans)
    progress = True
    while progress:
        progress = False
        for s, plan in enumerate(plans):
            while position[s] < len(plan):
                action = plan[position[s]]
                start, needs = clock[s], schedule.before(s, action)
                if needs is not None:
                    other, wanted = needs
                    if wanted not in done[other]:
                        break
                    ready = done[other][wanted].end
                    if other == s:
                        start = max(start, ready)
                    else:
                        start = max(start, ready + transfer) if duplex or hidden else max(start, ready) + transfer
                _check_order(schedule, done[s], s, action)
                end = start + cost(grid.virtual_stage(s, action.chunk), action)
                done[s][action] = Span(action, start, end)
                sent = schedule.after(s, action)
                clock[s] = end + (transfer if not hidden and sent is not None and sent[0] != s else 0.0)
                position[s] += 1
                progress = True
    if any(at < len(plan) for at, plan in zip(position, plans)):
        waiting = {s: str(plan[at]) for s, (at, plan) in enumerate(zip(position, plans)) if at < len(plan)}
        raise ValueError(
            f"{schedule.name} deadlocks with {schedule.stages} stages and {schedule.micro_batches} micro-batches; "
            f"waiting: {waiting}"
        )
    return [list(spans.values()) for spans in done]


_FOLLOWS = {Kind.BACKWARD: Kind.FORWARD, Kind.INPUT: Kind.FORWARD, Kind.WEIGHT: Kind.INPUT}


def _check_order(schedule: Schedule, done: dict[Action, Span], stage: int, action: Action) -> None:
    first = _FOLLOWS.get(action.kind)
    if first is not None and Action(first, action.micro_batch, action.chunk) not in done:
        raise ValueError(f"{schedule.name}: {action} on stage {stage} before its {first.name.lower()} pass")


def bubble_fraction(
    name: str, stages: int, micro_batches: int, chunks: int = 1, *, forward: float = 1.0, backward: float = 2.0
) -> float:
    """Idle time over useful time of a stage with equal chunks; (p - 1) / (m v) for gpipe and 1F1B, v chunks a stage."""
    spans = simulate(make_schedule(name, stages, micro_batches, chunks), unit_cost(forward, backward))
    busy = micro_batches * chunks * (forward + backward)
    return (max(stage[-1].end for stage in spans) - busy) / busy
