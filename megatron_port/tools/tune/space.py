"""Every legal layout of a run, planned: what a tuner may choose from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_port.core.config.checks import check
from megatron_port.core.config.layout import model_ranks, with_values
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.errors import ConfigError
from megatron_port.tools.plan.case import Case, Machine, case_of, machine_of
from megatron_port.tools.plan.search import (
    FINALISTS,
    NEUTRAL,
    Candidate,
    allowed,
    finalists,
    is_legal,
    legal_chunks,
    options_of,
    search,
    settings_of,
)
from megatron_port.tools.plan.step import plan_step


@dataclass(frozen=True)
class Space:
    """Search space: a run and its layouts."""

    config: RunConfig
    machine: Machine
    world: int
    """Devices of the run as it is."""
    candidates: tuple[Candidate, ...]
    """All of them; those that fit first, by planned tokens per second and device."""
    _index: dict[tuple[Any, ...], Candidate] = field(default_factory=dict, repr=False)

    @property
    def fitting(self) -> list[Candidate]:
        """Return those that fit, best first."""
        return [c for c in self.candidates if c.fits(self.machine)]

    def settings(self, candidate: Candidate) -> dict[str, Any]:
        """Return dotted leaf → value of a candidate's layout."""
        return settings_of(self.config, candidate.case)

    def legal(self, candidate: Candidate) -> bool:
        """Return whether training would take it (the engine's own limits included)."""
        return is_legal(self.config, candidate.case)

    def exact(self, candidate: Candidate) -> Candidate:
        """Return the candidate with its pipeline simulated instead of in closed form."""
        return replace(candidate, step=plan_step(candidate.case, self.machine))

    def find(self, values: dict[str, Any]) -> Candidate | None:
        """Return the candidate with these ``parameters``; None: there is none."""
        if not self._index:
            self._index.update({tuple(parameters(c.case).values()): c for c in self.candidates})
        return self._index.get(tuple(values[name] for name in PARAMETERS))


PARAMETERS = (
    "world", "tp", "pp", "vp", "ep", "sequence_parallel", "micro_batch", "recompute", "zero_stage", "schedule",
    "cp", "cp_method", "cp_order",
)
"""Free parameters of a layout; dp and accumulation follow."""


def parameters(case: Case) -> dict[str, Any]:
    """Return the free parameters of a layout."""
    return {name: getattr(case, name) for name in PARAMETERS}


def make_space(config: RunConfig, *, world_size: int | None = None, nodes: Sequence[int] = ()) -> Space:
    """Plan every legal layout of a run.

    ``world_size``: devices; None: what the run says. ``nodes``: numbers of nodes to try instead.

    Raises:
        ConfigError: the run is not legal, its cluster says too little to plan, or the numbers make no sense.
    """
    if any(n < 1 for n in nodes):
        raise ConfigError(f"--nodes {' '.join(map(str, nodes))}: each number must be at least 1")
    if world_size is not None and nodes:
        raise ConfigError("--nproc is for one machine; leave --nodes out")
    worlds = tuple(sorted({n * config.cluster.gpus_per_node for n in nodes})) or (_world(config, world_size),)
    many = nodes[0] if nodes else config.cluster.nodes if world_size is None else 0
    config = with_values(config, {"cluster.nodes": many, "layout.data_parallel_size": 0})
    neutral = with_values(config, {**NEUTRAL, "layout.context_parallel_size": 1})
    if legal_chunks(config.layout.pipeline_schedule, 2) and not legal_chunks(config.layout.pipeline_schedule, 1):
        neutral = with_values(neutral, {"layout.pipeline_schedule": "1f1b"})  # zb-v has two chunks a stage, always
    check(neutral, world_size=1)
    machine = machine_of(config)
    base, _ = case_of(neutral, 1)
    options = replace(
        options_of(with_values(neutral, {"cluster.nodes": many}), replace(base, dp=max(worlds))), worlds=worlds,
        schedules=allowed(neutral, "layout.pipeline_schedule", config),
        zero=allowed(neutral, "layout.zero_stage", config),
    )
    found = search(base, machine, options, keep_unfit=True)
    found.sort(key=lambda c: (not c.fits(machine), -c.step.model_tflops))
    return Space(config=config, machine=machine, world=max(worlds), candidates=tuple(found))


def _world(config: RunConfig, world_size: int | None) -> int:
    """Return the devices to tune for. Raises ConfigError where their number is open."""
    if world_size is not None:
        if world_size < 1:
            raise ConfigError(f"--nproc {world_size}: at least 1")
        return world_size
    layout = config.layout
    if not config.cluster.nodes and not layout.data_parallel_size:
        raise ConfigError(
            "nothing says how many devices to tune for; give --nodes N (or cluster.nodes), or --nproc N for N "
            "processes on this machine"
        )
    told = model_ranks(layout) * layout.data_parallel_size
    return config.cluster.nodes * config.cluster.gpus_per_node or told


def best_legal(space: Space, count: int) -> list[Candidate]:
    """The ``count`` best that fit and that training takes, best first: of more that are best in closed form, those that
    are when simulated with the schedule that training runs."""
    return finalists(space.fitting, space.machine, count=max(count, FINALISTS), legal=space.legal)[:count]
