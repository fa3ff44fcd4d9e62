"""Checks of a run by the planner before the ranks connect: does it fit its devices, do stages starve?

Memory is checked only where the cluster file states the device memory (``cluster.memory_gb`` and a ``[hardware]``
section); anything else that is wrong with a run is found elsewhere, so nothing here raises for it.
"""

from __future__ import annotations

import os
from dataclasses import replace

from megatron_port.core.config.loader import load
from megatron_port.core.config.machine import HardwareConfig
from megatron_port.core.config.schema import RunConfig
from megatron_port.run.elastic import as_started
from megatron_port.tools.plan.activation_plan import with_activation_plan
from megatron_port.tools.plan.case import Case, Machine, case_of, machine_problems
from megatron_port.tools.plan.fastest import fastest, ways_to_fit
from megatron_port.tools.plan.memory import StageMemory, host_problem, plan_memory
from megatron_port.tools.plan.search import Candidate, flags_of
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


# Default machine of ``plan`` for a cluster that has no ``[hardware]`` section, and the sentence about it.
#
# Training does not use any of it: there such a cluster is not judged (``plan.guard``).

GPU = "clusters/dgx-h100"
"""Default GPU of a cluster without a description."""
CORE = HardwareConfig(
    # A core of 2020 or later with AVX2 at 3 GHz does 96 GFLOP/s in fp32; large products of torch on one thread reach
    # about two thirds of that. The others are orders of magnitude: a share of a socket's memory, torch's dispatch of an
    # operation, gloo over the loopback interface.
    device="a CPU core", matmul_tflops=0.06, fp32_matmul_tflops=0.06, compute_units=1, tile_rows=16, tile_columns=16,
    inner_fill=16, launch_us=10.0, memory_bandwidth_gb=10.0, memory_efficiency=0.8, reserved_gb=0.3,
    fragmentation=0.0, node_gb=1.0, node_latency_us=100.0, jitter=0.05,
)


def is_described(config: RunConfig) -> bool:
    """Whether the run's cluster says what its devices are."""
    return bool(config.hardware.device or config.hardware.matmul_tflops)


def with_assumed_hardware(config: RunConfig) -> tuple[RunConfig, str]:
    """Return a run whose cluster is described, and what was assumed for that; empty: nothing.

    A run for CPUs gets a core for each rank, or the ranks' share of this machine's cores; any other a DGX H100. What
    the cluster does say (memory, peak, ranks of a node) is kept.
    """
    if is_described(config):
        return config, ""
    cluster = config.cluster
    measure = "`megatron-port bench calibrate` measures a machine"
    if config.backend.device != "cpu":
        default = load(GPU).config
        cluster = replace(
            cluster, memory_gb=cluster.memory_gb or default.cluster.memory_gb,
            peak_tflops=cluster.peak_tflops or default.cluster.peak_tflops,
        )
        return replace(config, cluster=cluster, hardware=default.hardware), (
            f"cluster {cluster.name!r} has no [hardware] section: planned as if each node were one of {GPU} "
            f"({default.hardware.device}), a default and no measurement; extend the cluster that you have "
            f"(`megatron-port config list`), or {measure}"
        )
    cores, ranks = os.cpu_count() or 1, max(cluster.gpus_per_node, 1)
    share = min(cores / ranks, 1.0)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks / 1e9
    rate = CORE.matmul_tflops * share
    hardware = replace(
        CORE, matmul_tflops=rate, fp32_matmul_tflops=rate, memory_bandwidth_gb=CORE.memory_bandwidth_gb * share,
        launch_us=CORE.launch_us / share,
    )
    cluster = replace(
        cluster, memory_gb=cluster.memory_gb or round(memory, 2), peak_tflops=cluster.peak_tflops or 0.096 * share,
    )
    return replace(config, cluster=cluster, hardware=hardware), (
        f"cluster {cluster.name!r} has no [hardware] section: planned for this machine's {cores} cores and "
        f"{memory * ranks:.0f} GB, shared by {ranks} ranks, at rates of a usual core (products "
        f"{CORE.matmul_tflops * 1e3:.0f} GFLOP/s), a default and no measurement; {measure}"
    )
