"""Default machine of ``plan`` for a cluster that has no ``[hardware]`` section, and the sentence about it.

Training does not use any of it: there such a cluster is not judged (``plan.guard``).
"""

from __future__ import annotations

import os
from dataclasses import replace

from megatron_port.core.config.loader import load
from megatron_port.core.config.machine import HardwareConfig
from megatron_port.core.config.schema import RunConfig

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
