"""The pipeline of one step, by simulating its schedule with the real times of every stage.

``pipeline.schedules`` gives the order of passes, the same that the engine runs, ``pipeline.simulate`` their times.
A stage does its passes in order; a pass waits for what it needs from its neighbour. Beyond a few times p micro-batches
every further one adds the same time, so long steps are simulated in part and continued along that line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_port.core.pipeline.actions import Action, Kind, Span
from megatron_port.core.pipeline.schedules import make_schedule
from megatron_port.core.pipeline.simulate import flow, simulate
from megatron_port.core.registry import SCHEDULES
from megatron_port.tools.plan.case import grid_of


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
