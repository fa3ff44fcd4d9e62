"""Pipeline schedules as data: for each stage, the order of its forward and backward passes.

A schedule says only what a stage computes and when; sends and receives follow
from it (a forward pass needs the previous stage's output, a backward pass the
next stage's gradient). The runner, the checker and the simulator read the same
list.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What an action computes."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True)
class Action:
    """One pass of one micro-batch on a stage."""

    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.micro_batch}"


def gpipe(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """All forwards, then all backwards (Huang et al., arXiv 1811.06965); every micro-batch is in flight at once."""
    order = range(micro_batches)
    return [Action(Kind.FORWARD, m) for m in order] + [Action(Kind.BACKWARD, m) for m in order]


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """1F1B (PipeDream-Flush, Narayanan et al., arXiv 2104.04473): at most ``stages - stage`` micro-batches in flight.

    Fewer micro-batches than stages are allowed; the warm-up is then cut short.
    """
    warmup = min(stages - stage - 1, micro_batches)
    actions = [Action(Kind.FORWARD, m) for m in range(warmup)]
    for m in range(micro_batches - warmup):
        actions += [Action(Kind.FORWARD, warmup + m), Action(Kind.BACKWARD, m)]
    return actions + [Action(Kind.BACKWARD, m) for m in range(micro_batches - warmup, micro_batches)]


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b}


def peak_in_flight(actions: list[Action]) -> int:
    """Largest number of micro-batches whose activations a stage holds."""
    held = peak = 0
    for action in actions:
        held += 1 if action.kind is Kind.FORWARD else -1
        peak = max(peak, held)
    return peak


def simulate(
    name: str, stages: int, micro_batches: int, *, forward: float = 1.0, backward: float = 2.0
) -> list[dict[Action, tuple[float, float]]]:
    """Start and end of every action on every stage, with free and unbounded sends.

    Raises ValueError when the schedule deadlocks (an action waits for one that never ends).
    """
    plans = [SCHEDULES[name](s, stages, micro_batches) for s in range(stages)]
    done: list[dict[Action, tuple[float, float]]] = [{} for _ in range(stages)]
    clock, position = [0.0] * stages, [0] * stages
    progress = True
    while progress:
        progress = False
        for s in range(stages):
            while position[s] < len(plans[s]):
                action = plans[s][position[s]]
                needs = s - 1 if action.kind is Kind.FORWARD else s + 1
                ready = 0.0
                if 0 <= needs < stages:
                    if action not in done[needs]:
                        break
                    ready = done[needs][action][1]
                if action.kind is Kind.BACKWARD and Action(Kind.FORWARD, action.micro_batch) not in done[s]:
                    raise ValueError(f"{name}: {action} on stage {s} before its forward pass")
                start = max(clock[s], ready)
                end = start + (forward if action.kind is Kind.FORWARD else backward)
                done[s][action] = (start, end)
                clock[s] = end
                position[s] += 1
                progress = True
    if any(position[s] < len(plans[s]) for s in range(stages)):
        waiting = {s: str(plans[s][position[s]]) for s in range(stages) if position[s] < len(plans[s])}
        raise ValueError(f"{name} deadlocks with {stages} stages and {micro_batches} micro-batches; waiting: {waiting}")
    return done


def bubble_fraction(
    name: str, stages: int, micro_batches: int, *, forward: float = 1.0, backward: float = 2.0
) -> float:
    """Idle time over useful time of a stage; (p - 1) / m for gpipe and 1F1B with equal stages."""
    times = simulate(name, stages, micro_batches, forward=forward, backward=backward)
    span = max(end for stage in times for _, end in stage.values())
    busy = micro_batches * (forward + backward)
    return (span - busy) / busy
