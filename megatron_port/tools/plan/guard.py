"""Checks of a run by the planner before the ranks connect: does it fit its devices, do stages starve?

Memory is checked only where the cluster file states the device memory (``cluster.memory_gb`` and a ``[hardware]``
section); anything else that is wrong with a run is found elsewhere, so nothing here raises for it.
"""

from __future__ import annotations

from megatron_port.core.config.schema import RunConfig
from megatron_port.tools.plan.activation_plan import with_activation_plan
from megatron_port.tools.plan.advice import ways_to_fit
from megatron_port.tools.plan.case import Case, Machine, case_of, machine_problems
from megatron_port.tools.plan.fastest import fastest
from megatron_port.tools.plan.memory import StageMemory, plan_memory
from megatron_port.tools.plan.offload import host_problem
from megatron_port.tools.plan.search import Candidate, flags_of
from megatron_port.tools.plan.starved import as_started
from megatron_port.tools.plan.step import plan_step

MORE_NODES = (2, 4, 8, 16)
"""Multiples of the run's devices on which a layout is looked for when none fits."""


def planned_memory(config: RunConfig, world_size: int | None = None) -> tuple[Case, Machine, list[StageMemory]] | None:
    """Case, machine and the memory of every stage; None where a device's memory is not known or the run is not legal.

    ``world_size``: ranks that were started (an elastic run is planned with the layout that it will take).
    """
    described = config.hardware.device or config.hardware.matmul_tflops
    if config.cluster.memory_gb <= 0 or not described:
        return None
    legal = as_started(config, world_size)
    if legal is None:
        return None
    config = legal
    case, _ = case_of(with_activation_plan(config, world_size), world_size)
    machine = Machine(cluster=config.cluster, hardware=config.hardware, calibration=config.calibration)
    return case, machine, plan_memory(case, machine)


def memory_problem(config: RunConfig, world_size: int | None = None) -> str:
    """Return why the run cannot fit its devices, by how much, and a layout that fits; empty where it fits.

    Empty as well where nothing is known of the device's memory, or ``launch.memory_check`` is off.
    """
    planned = planned_memory(config, world_size) if config.launch.memory_check != "off" else None
    if planned is None:
        return ""
    case, machine, stages = planned
    worst, limit = max(stages, key=lambda m: m.total), machine.cluster.memory_gb * 1e9
    if worst.total <= limit:
        host = host_problem(case, machine)
        return f"this run cannot fit: {host}" if host else ""
    over = [m.stage for m in stages if m.total > limit]
    which = f"{len(over)} of {len(stages)} stages do not fit; " if len(over) > 1 else ""
    parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in worst.parts().items() if size >= 5e7)
    return (
        f"this run cannot fit: {which}stage {worst.stage} needs {worst.total / 1e9:.1f} GB at {worst.peak_at} "
        f"({parts}), a device of {machine.cluster.name} has {limit / 1e9:g} GB (cluster.memory_gb): "
        f"{(worst.total - limit) / 1e9:.1f} GB too much with {case.label()}. {_way_out(config, case, machine)} "
        "`megatron-port plan` shows more; --set launch.memory_check=warn starts it all the same"
    )


def _way_out(config: RunConfig, case: Case, machine: Machine) -> str:
    """The cheapest change with which the run fits, else the fastest layout that does, on as many devices or more."""
    lacking = machine_problems(machine)
    if lacking:
        return f"No other layout can be looked for: {lacking[0]}."
    ways = ways_to_fit(config, case, machine, count=1)
    if ways:
        more = ways[0].seconds - plan_step(case, machine, quick=True).seconds
        return (
            f"The cheapest change that fits: {ways[0].flags} ({ways[0].memory.total / 1e9:.1f} GB, {more:+.2f} s a "
            f"step; {ways[0].case.label()})."
        )
    near = next(iter(fastest(config, case, machine, finalists=1)), None)
    if near is not None:
        flags = flags_of(config, case, near.case)
        return f"The fastest layout that fits: {near.case.label()} ({_gigabytes(near)}): {flags}."
    for factor in MORE_NODES:
        world = factor * case.world
        near = next(iter(fastest(config, case, machine, world=world, finalists=1)), None)
        if near is not None:
            devices = f"{case.world} device{'' if case.world == 1 else 's'}"
            return (
                f"No layout on {devices} fits; on {world} the fastest is {near.case.label()} "
                f"({_gigabytes(near)})."
            )
    return f"No layout fits, nor on {MORE_NODES[-1]} times the {case.world} devices."


def _gigabytes(candidate: Candidate) -> str:
    return f"{candidate.memory.total / 1e9:.1f} GB"
