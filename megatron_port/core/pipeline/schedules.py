"""Pipeline schedules as data: for each stage, the order of its passes.

A schedule says only what a stage computes and when; sends and receives follow
from it (a forward pass needs the output of the chunk before it, a backward pass
the gradient from the chunk after it). The runner, the checker, the simulator,
the planner and the trace read the same lists.

| name | passes | held at most, in micro-batches of a whole stage | bubble, F = I = W |
|---|---|---|---|
| ``gpipe`` (arXiv 1811.06965) | all forwards, all backwards | m | (p - 1) / m |
| ``1f1b`` (arXiv 2104.04473) | one forward, one backward | p - s | (p - 1) / m |
| ``1f1b``, v chunks a stage (the same) | interleaved: the same, chunk after chunk | more than 1f1b | (p - 1) / (m v) |
| ``zb-h1`` (arXiv 2401.10241) | gradients of inputs first, of weights in the gaps | p | (p - 1) / (3 m) |
| ``zb-v`` (the same) | the same on a folded pipeline, two chunks a stage | p | (p - 1) / (6 m) |

Where experts are divided over ranks, weight passes of ``zb-h1`` fill exchanges (``pipeline.filling``).

torch.distributed.pipelining has schedules of these names too; why they are not used: docs/decisions.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from megatron_port.core.dist.topology import Topology
from megatron_port.core.errors import ConfigError
from megatron_port.core.pipeline.actions import Action, Kind, Schedule
from megatron_port.core.pipeline.check import check
from megatron_port.core.pipeline.filling import filled
from megatron_port.core.pipeline.zero_bubble import list_schedule
from megatron_port.core.registry import SCHEDULES


@lru_cache(maxsize=64)
def _passes(kind: Kind, micro_batches: int, chunk: int = 0) -> tuple[Action, ...]:
    """Return one pass per micro-batch; the stages share these objects."""
    return tuple(Action(kind, m, chunk) for m in range(micro_batches))


def gpipe(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """GPipe: all forward passes, then all backward passes; every micro-batch is held at once."""
    return [*_passes(Kind.FORWARD, micro_batches), *_passes(Kind.BACKWARD, micro_batches)]


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """1F1B (PipeDream-Flush): at most ``stages - stage`` micro-batches held.

    Fewer micro-batches than stages are allowed; the warm-up is then cut short.
    """
    warmup = min(stages - stage - 1, micro_batches)
    forwards, backwards = _passes(Kind.FORWARD, micro_batches), _passes(Kind.BACKWARD, micro_batches)
    actions = list(forwards[:warmup])
    for pair in zip(forwards[warmup:], backwards):
        actions += pair
    return actions + list(backwards[micro_batches - warmup :])


def _by_groups(stages: int, chunks: int, micro_batches: int) -> list[tuple[int, int]]:
    """(chunk, micro-batch) in the order of interleaving: groups of ``stages`` go through chunk after chunk.

    The last group may be smaller, so the number of micro-batches need not divide evenly.
    """
    return [
        (chunk, m)
        for first in range(0, micro_batches, stages)
        for chunk in range(chunks)
        for m in range(first, min(first + stages, micro_batches))
    ]


def interleaved(stage: int, stages: int, chunks: int, micro_batches: int, group: int = 0) -> list[Action]:
    """Interleaved 1F1B (Narayanan et al., arXiv 2104.04473).

    Where the stages do not divide the micro-batches, it is the schedule of the next larger number that they divide
    without the passes of the missing micro-batches: no micro-batch waits for another, so the other passes still run.

    ``group``: micro-batches that pass a chunk before the stage's next one is their turn; 0: the stages' number. Others
    are planned for Megatron-core's runs only (``microbatch-group-size-per-virtual-pipeline-stage``).
    """
    group = group or stages
    whole = -(-micro_batches // group) * group
    order = _by_groups(group, chunks, whole)
    forward, backward = ([_passes(kind, whole, c) for c in range(chunks)] for kind in (Kind.FORWARD, Kind.BACKWARD))
    forwards = [forward[c][m] for c, m in order]
    backwards = [backward[chunks - 1 - c][m] for c, m in order]
    warmup = min((stages - stage - 1) * 2 + (chunks - 1) * group, len(order))
    actions = forwards[:warmup]
    for f, b in zip(forwards[warmup:], backwards):
        actions += [f, b]
    actions += backwards[len(order) - warmup :]
    return [a for a in actions if a.micro_batch < micro_batches]


@lru_cache(maxsize=64)
def forward_only(grid: Topology, micro_batches: int) -> Schedule:
    """Schedule of an evaluation: forward passes only."""
    order = tuple(Action(Kind.FORWARD, m, c) for c, m in _by_groups(grid.pp, grid.vp, micro_batches))
    return Schedule("forward", grid, micro_batches, (order,) * grid.pp)


@lru_cache(maxsize=64)
def make_schedule(
    name: str, stages: int, micro_batches: int, chunks: int = 1, *, exchanges: bool = False
) -> Schedule:
    """Return the schedule of a step. Made once per step size; lists of all stages, O(stages × micro-batches).

    ``exchanges``: the passes exchange rows of experts, which weight passes may fill (``pipeline.filling``).

    Schedules of one chunk a stage are functions (stage, stages, micro-batches) → the stage's actions; those that
    plugins register are checked here (``pipeline.check``).

    Raises:
        ValueError: there is no such schedule with so many chunks a stage (``config.checks`` says what there is).
        ConfigError: a plugin's schedule is not right for this many stages and micro-batches.
    """
    if name not in SCHEDULES.names or (name not in ("1f1b", "zb-v") and chunks > 1):
        raise ValueError(f"no schedule {name!r} with {chunks} chunks a stage")
    grid = Topology(pp=stages, vp=chunks, folded=name == "zb-v")
    plans: Sequence[Sequence[Action]]
    if name in ("zb-h1", "zb-v"):
        plans = list_schedule(grid, micro_batches)
    elif chunks > 1:
        plans = [interleaved(s, stages, chunks, micro_batches) for s in range(stages)]
    else:
        actions = SCHEDULES.function(name)
        plans = [actions(s, stages, micro_batches) for s in range(stages)]
    if exchanges and name == "zb-h1":
        plans = [filled(plan) for plan in plans]
    schedule = Schedule(name, grid, micro_batches, tuple(tuple(plan) for plan in plans))
    if name in SCHEDULES.added:
        _check_added(schedule)
    return schedule


def _check_added(schedule: Schedule) -> None:
    """Raise ConfigError where a plugin's schedule would compute something else, or wait for ever."""
    try:
        check(schedule)
    except ValueError as error:
        raise ConfigError(
            f'layout.pipeline_schedule "{schedule.name}", with {schedule.stages} stages and '
            f"{schedule.micro_batches} micro-batches: {error}; correct the plugin's function"
        ) from error
