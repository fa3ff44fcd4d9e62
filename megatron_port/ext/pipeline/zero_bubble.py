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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_port.core.dist.mesh import Topology
from megatron_port.core.pipeline.schedules import Action, Kind

_H1 = ((Kind.FORWARD, 0), (Kind.INPUT, 0), (Kind.WEIGHT, 0))
_V = (
    (Kind.INPUT, 0), (Kind.INPUT, 1), (Kind.FORWARD, 1), (Kind.FORWARD, 0), (Kind.WEIGHT, 1), (Kind.WEIGHT, 0),
)


@lru_cache(maxsize=4)
def list_schedule(grid: Topology, micro_batches: int) -> list[list[Action]]:
    """Return the plan of each stage; ``grid.folded`` says whether it is zb-v or zb-h1."""
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
# products that need nothing new: those of a weight pass (zero bubble). ``zb-h1`` puts most of its weight passes right
# before a forward pass. Here such a pair changes places, and the weight pass ``fills`` the exchanges of the forward
# pass:
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
# Weight passes before an ``INPUT`` keep their place: the end of that pass is what the stage before waits for, and
# they fill the gap until its gradient arrives. So does ``zb-v``, whose two chunks wait for one another in both
# directions: in a simulation with F = I = W and exchanges of a quarter to all of that, pairs that change places
# lengthen its steps by up to 9 % and shorten those of zb-h1 by 5 to 17 % (``tests/unit/test_pipeline_filling.py``).

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


@dataclass(frozen=True)
class ZeroBubble:
    """``zb-h1``: (stage, stages, micro-batches) → the stage's actions; it lets weight passes fill exchanges."""

    def __call__(self, stage: int, stages: int, micro_batches: int) -> list[Action]:
        return list_schedule(Topology(pp=stages), micro_batches)[stage]

    def filled(self, plan: Sequence[Action]) -> list[Action]:
        """Return :func:`filled`."""
        return filled(plan)


def zb_v(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """Return the actions of a stage of two chunks."""
    return list_schedule(Topology(pp=stages, vp=2, folded=True), micro_batches)[stage]


ZB_H1 = ZeroBubble()
