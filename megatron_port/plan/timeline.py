"""The pipeline of one step, by simulating its schedule with the real times of every stage.

``pipeline.schedules`` gives the order of passes of GPipe and 1F1B; the interleaved order of
arXiv 2104.04473 is made here. A stage does its passes in order; a pass waits for
what it needs from its neighbour. Beyond a few times p micro-batches every further one adds the same
time, so long steps are simulated in part and continued along that line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron_port.pipeline.schedules import SCHEDULES, Kind

Pass = tuple[bool, int, int]
"""(is a backward, chunk in order of the layers, micro-batch)."""


@dataclass(frozen=True)
class Timeline:
    """A step's forward and backward passes."""

    span: float
    """Seconds from the first forward to the end of the last backward."""
    busy: tuple[float, ...]
    """Seconds that each stage computes."""


@lru_cache(maxsize=512)
def passes(schedule: str, stage: int, stages: int, chunks: int, micro_batches: int) -> tuple[Pass, ...]:
    """The order of a stage's passes; chunk c of the model lies on stage c mod ``stages``."""
    if schedule != "interleaved" or chunks == 1:
        name = "1f1b" if schedule == "interleaved" else schedule
        return tuple(
            (a.kind is Kind.BACKWARD, stage, a.micro_batch) for a in SCHEDULES[name](stage, stages, micro_batches)
        )
    total = micro_batches * chunks

    def place(index: int, backward: bool) -> tuple[int, int]:
        # Groups of `stages` micro-batches go through chunk after chunk; the last group may be smaller.
        group, inside = divmod(index, stages * chunks)
        size = min(stages, micro_batches - group * stages)
        chunk, micro = divmod(inside, size)
        chunk = chunks - 1 - chunk if backward else chunk
        return chunk * stages + stage, group * stages + micro

    warmup = min((stages - stage - 1) * 2 + (chunks - 1) * stages, total)
    out: list[Pass] = [(False, *place(i, False)) for i in range(warmup)]
    for i in range(total - warmup):
        out += [(False, *place(warmup + i, False)), (True, *place(i, True))]
    return (*out, *((True, *place(i, True)) for i in range(total - warmup, total)))


def _simulate(
    schedule: str, stages: int, forward: Sequence[float], backward: Sequence[float], transfer: float, hidden: bool,
    duplex: bool, micro_batches: int,
) -> float:
    chunks = len(forward)
    plans = [passes(schedule, s, stages, chunks // stages, micro_batches) for s in range(stages)]
    ends = ([[-1.0] * micro_batches for _ in range(chunks)], [[-1.0] * micro_batches for _ in range(chunks)])
    clock, position = [0.0] * stages, [0] * stages
    left = sum(len(p) for p in plans)
    held_up = 0.0 if hidden else transfer
    while left:
        before = left
        for s in range(stages):
            plan, at, now = plans[s], position[s], clock[s]
            while at < len(plan):
                back, chunk, micro = plan[at]
                needs = chunk + 1 if back else chunk - 1
                if 0 <= needs < chunks:
                    ready = ends[back][needs][micro]
                    if ready < 0:
                        break
                    now = max(now, ready + transfer) if duplex or hidden else max(now, ready) + transfer
                elif back and ends[0][chunk][micro] < 0:
                    raise ValueError(f"{schedule}: backward {micro} of chunk {chunk} before its forward")
                now += backward[chunk] if back else forward[chunk]
                ends[back][chunk][micro] = now
                sends = chunk > 0 if back else chunk < chunks - 1
                now += held_up if sends else 0.0
                at += 1
                left -= 1
            position[s], clock[s] = at, now
        if left == before:
            raise ValueError(f"{schedule} deadlocks with {stages} stages and {micro_batches} micro-batches")
    return max(clock)


def timeline(
    schedule: str, stages: int, forward: Sequence[float], backward: Sequence[float], *, transfer: float = 0.0,
    hidden: bool = False, duplex: bool = True, micro_batches: int,
) -> Timeline:
    """Simulate a step.

    ``forward``, ``backward``: seconds of each chunk for one micro-batch, stages × chunks a stage of them.
    ``transfer``: seconds of one activation between stages; ``hidden``: it does not hold up its sender.
    ``duplex``: a stage sends and receives at once; else the receiver, too, spends the time of the transfer.
    """
    chunks = len(forward) // stages
    busy = tuple(micro_batches * (sum(forward[s::stages]) + sum(backward[s::stages])) for s in range(stages))
    if stages == 1 and chunks == 1:
        return Timeline(span=busy[0], busy=busy)
    most = 3 * stages + micro_batches % stages
    if schedule == "gpipe" or micro_batches <= most + stages:
        return Timeline(_simulate(schedule, stages, forward, backward, transfer, hidden, duplex, micro_batches), busy)
    short = _simulate(schedule, stages, forward, backward, transfer, hidden, duplex, most)
    long = _simulate(schedule, stages, forward, backward, transfer, hidden, duplex, most + stages)
    return Timeline(short + (long - short) / stages * (micro_batches - most), busy)


def quick_span(
    stages: int, forward: Sequence[float], backward: Sequence[float], *, transfer: float, hidden: bool,
    duplex: bool = True, micro_batches: int,
) -> float:
    """An estimate of the span without a simulation, for a search: one micro-batch through all stages, and then the
    slowest stage for each further one; interleaving shortens the first part by its chunks."""
    chunks = len(forward) // stages
    each = 0.0 if hidden else transfer * chunks * (1 if duplex else 2)
    busy = [sum(forward[s::stages]) + sum(backward[s::stages]) for s in range(stages)]
    slowest = max(t + each * ((s > 0) + (s < stages - 1)) for s, t in enumerate(busy))  # the ends have one neighbour
    through = (sum(forward) + sum(backward)) / chunks + 2 * (stages - 1) * transfer
    return through + (micro_batches - 1 / chunks) * slowest if chunks > 1 else through + (micro_batches - 1) * slowest
