"""When each stage of a pipeline computes what, for a picture: the schedule's order replayed with the planned times."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_port.pipeline.schedules import Kind
from megatron_port.plan.case import Case, Machine
from megatron_port.plan.step import chunk_costs
from megatron_port.plan.timeline import replay


@dataclass(frozen=True)
class Interval:
    """One pass on a stage; seconds from the start of the step."""

    stage: int
    kind: Kind
    chunk: int
    """Chunk of the stage."""
    micro_batch: int
    start: float
    end: float


def intervals(case: Case, machine: Machine, *, micro_batches: int | None = None) -> list[Interval]:
    """Every pass of a step of ``case`` (with fewer ``micro_batches``: of a shorter one), in order of time a stage.

    Transfers are left out: a pass may start when its neighbour's has ended.
    """
    costs = chunk_costs(case, machine)
    stages = replay(
        case.schedule, case.pp, [c.forward + c.forward_tensor for c in costs],
        [c.backward + c.backward_tensor for c in costs], micro_batches=micro_batches or case.micro_batches,
    )
    return [
        Interval(stage, span.action.kind, span.action.chunk, span.action.micro_batch, span.start, span.end)
        for stage, spans in enumerate(stages) for span in spans
    ]
