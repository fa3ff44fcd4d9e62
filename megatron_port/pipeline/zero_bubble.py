"""Zero-bubble schedules (Qi et al., arXiv 2401.10241), by list scheduling with unit costs and a memory limit.

At each tick every stage takes the best pass that is ready:

* ``zb-h1``: a forward, else a gradient of an input, else one of weights; at most p - s micro-batches between forward
  and INPUT (1F1B's), at most p between forward and WEIGHT (1F1B's on stage 0).
* ``zb-v``: gradients of inputs first (chunk 0 before chunk 1), then forwards (chunk 1 before chunk 0), then weights;
  at most 2p chunks held, p micro-batches of a whole stage.

With equal costs a step of m ≥ p micro-batches then takes 3m + p - 1 ticks under zb-h1, which is the least: the last
stage cannot start before tick p - 1. Under zb-v it is 6m + p - 1 ticks of half a stage for p up to 4 and for p 8 from
m = 2p on, and at most p / 2 + 1 ticks more for others (tests/unit/test_pipeline_schedules.py).
"""

from __future__ import annotations

from megatron_port.parallel.topology import Topology
from megatron_port.pipeline.schedules import Action, Kind

_H1 = ((Kind.FORWARD, 0), (Kind.INPUT, 0), (Kind.WEIGHT, 0))
_V = (
    (Kind.INPUT, 0), (Kind.INPUT, 1), (Kind.FORWARD, 1), (Kind.FORWARD, 0), (Kind.WEIGHT, 1), (Kind.WEIGHT, 0),
)


class _Board:
    """What is done on all chunks so far. Passes of one kind on one chunk go through the micro-batches in order."""

    def __init__(self, grid: Topology, micro_batches: int) -> None:
        self.grid, self.micro_batches = grid, micro_batches
        self.done = {kind: [0] * grid.virtual_stages for kind in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)}

    def ready(self, kind: Kind, virtual: int) -> bool:
        """The next pass of this kind on this chunk has what it needs."""
        number, last = self.done[kind][virtual], self.grid.virtual_stages - 1
        if number >= self.micro_batches:
            return False
        if kind is Kind.FORWARD:
            return virtual == 0 or self.done[kind][virtual - 1] > number
        if kind is Kind.WEIGHT:
            return self.done[Kind.INPUT][virtual] > number
        return self.done[Kind.FORWARD][virtual] > number and (virtual == last or self.done[kind][virtual + 1] > number)

    def held(self, virtuals: list[int], until: Kind) -> int:
        """(micro-batch, chunk) pairs on these chunks with their forward done and ``until`` not."""
        return sum(self.done[Kind.FORWARD][v] - self.done[until][v] for v in virtuals)


def list_schedule(grid: Topology, micro_batches: int) -> list[list[Action]]:
    """The plan of each stage; ``grid.folded`` says whether it is zb-v or zb-h1."""
    board = _Board(grid, micro_batches)
    priorities = _V if grid.folded else _H1
    mine = [[grid.virtual_stage(s, c) for c in range(grid.vp)] for s in range(grid.pp)]
    plans: list[list[Action]] = [[] for _ in range(grid.pp)]
    left = 3 * micro_batches * grid.virtual_stages
    while left:
        chosen = []
        for stage, virtuals in enumerate(mine):
            full = board.held(virtuals, Kind.WEIGHT) >= grid.vp * grid.pp or (
                not grid.folded and board.held(virtuals, Kind.INPUT) >= grid.pp - stage
            )
            for kind, chunk in priorities:
                if not (full and kind is Kind.FORWARD) and board.ready(kind, virtuals[chunk]):
                    chosen.append((stage, kind, chunk))
                    break
        if not chosen:
            raise ValueError(f"no pass is ready with {left} left: {grid}, {micro_batches} micro-batches")
        # Results count from the next tick on.
        for stage, kind, chunk in chosen:
            virtual = mine[stage][chunk]
            plans[stage].append(Action(kind, board.done[kind][virtual], chunk))
            board.done[kind][virtual] += 1
        left -= len(chosen)
    return plans
