"""When each stage of a pipeline computes what, for a picture: the schedule's order replayed with the planned times."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_port.plan.case import Case, Machine
from megatron_port.plan.links import Links
from megatron_port.plan.rates import Rates
from megatron_port.plan.step import chunk_costs
from megatron_port.plan.timeline import passes


@dataclass(frozen=True)
class Interval:
    """One pass on a stage; seconds from the start of the step."""

    stage: int
    backward: bool
    chunk: int
    micro_batch: int
    start: float
    end: float


def intervals(case: Case, machine: Machine, *, micro_batches: int | None = None) -> list[Interval]:
    """Every pass of a step of ``case`` (with fewer ``micro_batches``: of a shorter one), in order of time a stage.

    Transfers are left out: a pass may start when its neighbour's has ended.
    """
    count = micro_batches or case.micro_batches
    case = replace(case, micro_batches=count)
    costs = chunk_costs(case, Rates.of(machine), Links.of(machine))
    name = case.schedule if case.vp == 1 else "interleaved"
    plans = [list(passes(name, s, case.pp, case.vp, count)) for s in range(case.pp)]
    ends: dict[tuple[bool, int, int], float] = {}
    clock, at = [0.0] * case.pp, [0] * case.pp
    out: list[Interval] = []
    moved = True
    while moved:
        moved = False
        for s, plan in enumerate(plans):
            while at[s] < len(plan):
                backward, chunk, micro = plan[at[s]]
                needs = (backward, chunk + 1 if backward else chunk - 1, micro)
                inside = 0 <= needs[1] < len(costs)
                if inside and needs not in ends:
                    break
                start = max(clock[s], ends[needs] if inside else 0.0)
                cost = costs[chunk]
                spent = cost.backward + cost.backward_tensor if backward else cost.forward + cost.forward_tensor
                clock[s] = ends[(backward, chunk, micro)] = start + spent
                out.append(Interval(s, backward, chunk, micro, start, start + spent))
                at[s] += 1
                moved = True
    if any(a < len(p) for a, p in zip(at, plans)):
        raise ValueError(f"{name} deadlocks with {case.pp} stages and {count} micro-batches")
    return out
