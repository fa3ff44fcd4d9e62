"""Simulated start and end of each pass of a schedule, for given costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron_port.core.pipeline.schedules import Action, Kind, Schedule, Span, in_order

Cost = Callable[[int, Action], float]
"""(virtual stage, action) → time."""

_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)


def unit_cost(forward: float = 1.0, backward: float = 2.0) -> Cost:
    """Return the cost with equal chunks; the two parts of a split backward pass take half of it each."""
    times = {Kind.FORWARD: forward, Kind.BACKWARD: backward, Kind.INPUT: backward / 2, Kind.WEIGHT: backward / 2}
    return lambda virtual, action: times[action.kind]


@dataclass(frozen=True, eq=False)
class Flow:
    """All passes of a schedule in an order in which each comes after what it waits for; columns of equal length.

    A planner replays one schedule with many costs, so everything that depends on the order alone is computed once.
    """

    virtual_stages: int
    stages: int
    action: list[Action]
    stage: list[int]
    price: list[int]
    """Which cost: kind (forward, backward, input, weight) × virtual stages + the virtual stage."""
    needs: list[int]
    """Column of the pass whose result comes from another chunk; -1: of none."""
    comes: list[bool]
    """Whether the needed pass is on another stage."""
    leaves: list[bool]
    """The result goes to another stage."""
    host: list[int]
    """Column of the pass whose exchanges it fills; -1: of none."""

    def hidden(self, costs: Sequence[float], exchanges: Sequence[float]) -> list[float]:
        """Return how much of each pass's cost the exchanges of another hide: those of a forward pass, by virtual
        stage, hide what they last of the weight pass that fills them."""
        return [
            0.0 if host < 0 else min(cost, exchanges[self.price[host] % self.virtual_stages])
            for cost, host in zip(costs, self.host)
        ]

    def times(
        self, costs: Iterable[float], *, transfer: float = 0.0, hidden: bool = True, duplex: bool = True
    ) -> tuple[list[float], list[float]]:
        """Return the start and end of every pass, each as early as possible. ``costs``: of each pass; the rest as for
        :func:`simulate`."""
        # A message's time is waited for; unless hidden its sender, and without duplex its receiver, spends it as well.
        hold, waits = 0.0 if hidden else transfer, duplex or hidden
        clock = [0.0] * self.stages
        starts: list[float] = []
        ends: list[float] = []
        for cost, stage, needs, comes, leaves in zip(costs, self.stage, self.needs, self.comes, self.leaves):
            start = clock[stage]
            if needs >= 0:
                ready = ends[needs] + transfer if comes and waits else ends[needs]
                if ready > start:
                    start = ready
                if comes and not waits:
                    start += transfer
            end = start + cost
            starts.append(start)
            ends.append(end)
            clock[stage] = end + hold if leaves else end
        return starts, ends


@lru_cache(maxsize=16)
def flow(schedule: Schedule) -> Flow:
    """Return an order in which the passes of a schedule can run.

    Raises:
        ValueError: as ``pipeline.schedules.in_order``.
    """
    grid, m = schedule.grid, schedule.micro_batches
    total, last = grid.virtual_stages, grid.virtual_stages - 1
    found = Flow(total, schedule.stages, [], [], [], [], [], [], [])
    latest = [-1] * schedule.stages
    at = [-1] * (len(_KINDS) * total * m)  # by kind, virtual stage and micro-batch: its column
    number = {id(kind): i for i, kind in enumerate(_KINDS)}
    mine = [[grid.virtual_stage(s, c) for c in range(grid.vp)] for s in range(grid.pp)]
    holder = [grid.holder(v)[0] for v in range(total)]
    for s, action in in_order(schedule):
        kind, virtual, micro = number[id(action.kind)], mine[s][action.chunk], action.micro_batch
        price = kind * total + virtual
        needs, comes, leaves = -1, False, False
        if kind != 3:
            before, after = (virtual - 1, virtual + 1) if kind == 0 else (virtual + 1, virtual - 1)
            if 0 <= before <= last:
                needs, comes = at[(kind * total + before) * m + micro], holder[before] != s
            leaves = 0 <= after <= last and holder[after] != s
        at[price * m + micro] = len(found.action)
        found.action.append(action)
        found.stage.append(s)
        found.price.append(price)
        found.needs.append(needs)
        found.comes.append(comes)
        found.leaves.append(leaves)
        found.host.append(latest[s] if action.fills else -1)
        latest[s] = len(found.action) - 1
    return found


def simulate(
    schedule: Schedule, cost: Cost | None = None, *, transfer: float = 0.0, hidden: bool = True, duplex: bool = True,
    exchanges: Sequence[float] = (),
) -> list[list[Span]]:
    """Return the spans of every stage, in the order of its plan; each pass starts as early as possible.

    Args:
        cost: default: forward 1, backward 2.
        transfer: time of a message between stages; ``hidden``: it does not hold up its sender.
        duplex: a stage sends and receives at once; otherwise the receiver, too, spends the time of the transfer.
        exchanges: by virtual stage, how much of a forward pass its exchanges of rows last; none: nothing.

    Raises:
        ValueError: as :func:`flow`.
    """
    cost = cost or unit_cost()
    found = flow(schedule)
    costs = [cost(price % found.virtual_stages, action) for price, action in zip(found.price, found.action)]
    beside = found.hidden(costs, exchanges or [0.0] * found.virtual_stages)
    shown = [whole - part for whole, part in zip(costs, beside)]
    starts, ends = found.times(shown, transfer=transfer, hidden=hidden, duplex=duplex)
    out: list[list[Span]] = [[] for _ in schedule.plans]
    for stage, action, start, end, part in zip(found.stage, found.action, starts, ends, beside):
        out[stage].append(Span(action, start, end, part))
    return out


def bubble_fraction(schedule: Schedule, *, forward: float = 1.0, backward: float = 2.0) -> float:
    """Return idle / useful time of a stage with equal chunks; (p - 1) / (m v) for gpipe and 1F1B, v chunks a stage."""
    found = flow(schedule)
    cost = unit_cost(forward, backward)
    _, ends = found.times(cost(0, action) for action in found.action)
    busy = schedule.micro_batches * schedule.grid.vp * (forward + backward)
    return (max(ends) - busy) / busy
