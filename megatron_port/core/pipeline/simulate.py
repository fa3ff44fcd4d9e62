"""Simulated start and end of each pass of a schedule, for given costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron_port.core.errors import ConfigError
from megatron_port.core.pipeline.actions import Action, Kind, Schedule


@dataclass(frozen=True)
class Span:
    """A pass with its start and end, in the unit of the costs."""

    action: Action
    start: float
    end: float
    beside: float = 0.0
    """Seconds of a weight pass that ran before ``start``, beside the exchanges that it fills."""


Cost = Callable[[int, Action], float]
"""(virtual stage, action) → time."""

_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
_FOLLOWS = {1: 0, 2: 0, 3: 2}
"""A backward pass or its first half follows the forward pass on its own chunk, the second half the first."""


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
        ValueError: the schedule deadlocks (an action waits for one that never ends), or a pass comes before the one
            on the same chunk that it follows.
    """
    grid, m = schedule.grid, schedule.micro_batches
    total, last = grid.virtual_stages, grid.virtual_stages - 1
    found = Flow(total, schedule.stages, [], [], [], [], [], [], [])
    latest = [-1] * schedule.stages
    at = [-1] * (len(_KINDS) * total * m)  # by kind, virtual stage and micro-batch: its column
    number = {id(kind): i for i, kind in enumerate(_KINDS)}
    mine = [[grid.virtual_stage(s, c) for c in range(grid.vp)] for s in range(grid.pp)]
    holder = [grid.holder(v)[0] for v in range(total)]
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
                kind, virtual, micro = number[id(action.kind)], mine[s][action.chunk], action.micro_batch
                price = kind * total + virtual
                needs, comes, leaves = -1, False, False
                if kind != 3:
                    before, after = (virtual - 1, virtual + 1) if kind == 0 else (virtual + 1, virtual - 1)
                    if 0 <= before <= last:
                        needs = at[(kind * total + before) * m + micro]
                        if needs < 0:
                            break
                        comes = holder[before] != s
                    leaves = 0 <= after <= last and holder[after] != s
                own = _FOLLOWS.get(kind)
                if own is not None and at[(own * total + virtual) * m + micro] < 0:
                    name = _KINDS[own].name.lower()
                    raise ValueError(f"{schedule.name}: {action} on stage {s} before its {name} pass")
                at[price * m + micro] = len(found.action)
                found.action.append(action)
                found.stage.append(s)
                found.price.append(price)
                found.needs.append(needs)
                found.comes.append(comes)
                found.leaves.append(leaves)
                found.host.append(latest[s] if action.fills else -1)
                latest[s] = len(found.action) - 1
                position[s] += 1
            progress = progress or position[s] > first
    if any(at < len(plan) for at, plan in zip(position, schedule.plans)):
        waiting = {s: str(plan[at]) for s, (at, plan) in enumerate(zip(position, schedule.plans)) if at < len(plan)}
        raise ValueError(
            f"{schedule.name} deadlocks with {schedule.stages} stages and {schedule.micro_batches} micro-batches; "
            f"waiting: {waiting}"
        )
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


# Partition of the layers over the stages.

def balanced_layers(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Return the number of transformer layers per stage that makes the costliest stage as cheap as possible.

    ``costs``: of [embedding, layer 0, …, layer L-1, head]; the embedding stays
    on the first stage and the head on the last. Every stage gets at least one
    layer. Among equal optima the most even split is taken (least sum of squared
    costs, then the smaller stages last): a heavy head alone sets the maximum, and
    raising the others to that maximum would cost memory and save no time.

    Raises:
        ConfigError: fewer layers than stages.
    """
    count = len(costs) - 2
    if count < stages:
        raise ConfigError(
            f"num_layers {count} is less than pipeline_parallel_size {stages}: each stage needs a layer; "
            f"use pipeline_parallel_size {count} or fewer"
        )
    if stages == 1:
        return (count,)
    whole = float(costs[1]).is_integer() and float(costs[-1]).is_integer()
    if whole and costs[0] == 0 and len(set(costs[1:-1])) == 1:
        return _split_equal_layers(count, round(costs[1]), round(costs[-1]), stages)
    return search_split(costs, stages)


@lru_cache(maxsize=4096)
def _split_equal_layers(count: int, layer: int, head: int, stages: int) -> tuple[int, ...]:
    """Split layers of equal cost, with a free embedding, by a search over the number of layers on the last stage.

    The other stages get an even share of the rest, the larger first.
    """
    best: tuple[tuple[int, int], tuple[int, ...]] | None = None
    for last in range(1, count - stages + 2):
        each, extra = divmod(count - last, stages - 1)
        most = max((each + (extra > 0)) * layer, last * layer + head)
        squares = extra * ((each + 1) * layer) ** 2 + (stages - 1 - extra) * (each * layer) ** 2
        key = (most, squares + (last * layer + head) ** 2)
        if best is None or key < best[0]:
            best = key, (*(each + (i < extra) for i in range(stages - 1)), last)
    assert best is not None
    return best[1]


def search_split(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Solve :func:`balanced_layers` for units of any cost by dynamic programming over stages and layers."""
    layers = list(costs[1:-1])
    count = len(layers)
    prefix = [0.0]
    for c in layers:
        prefix.append(prefix[-1] + c)

    def cost(stage: int, start: int, stop: int) -> float:
        extra = (costs[0] if stage == 0 else 0.0) + (costs[-1] if stage == stages - 1 else 0.0)
        return prefix[stop] - prefix[start] + extra

    # best[k][i]: least possible maximum (then: sum of squares) over stages k… holding layers i…; and where k ends.
    limit = infinity = float("inf")
    for even in (False, True):
        best: list[list[float]] = [[infinity] * (count + 1) for _ in range(stages + 1)]
        ends = [[0] * (count + 1) for _ in range(stages)]
        best[stages][count] = 0
        for k in range(stages - 1, -1, -1):
            for i in range(count):
                for j in range(count - (stages - k - 1), i, -1):
                    one, rest = cost(k, i, j), best[k + 1][j]
                    # Whole numbers: the squares of FLOP counts stay exact, so equal sums are equal.
                    value = round(one) ** 2 + rest if even else max(one, rest)
                    if one <= limit and value < best[k][i]:
                        best[k][i], ends[k][i] = value, j
        limit = best[0][0]
    split, at = [], 0
    for k in range(stages):
        split.append(ends[k][at] - at)
        at = ends[k][at]
    return tuple(split)
