"""Optimizer state outside of the device (``[offload]``): bytes on device, host and disk, and the seconds that it costs.

Per element of a rank's share of what is offloaded (docs/offload.md): the host or the disk holds master and the rule's
state, of AdamW 12 bytes; a step moves the fp32 gradient to the host and the rounded weight back, updates in host memory
at some 28 + w bytes, and with a disk reads and writes the 12. The step waits for all of it: the norm comes first.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_port.tools.plan.case import Case, Machine
from megatron_port.tools.plan.elements import expert_elements, stage_elements, trained_elements
from megatron_port.tools.plan.swap import most_swapped

GRADIENT = MASTER = 4.0
"""Bytes per element."""
PAGE = 4096


@dataclass(frozen=True)
class Offloaded:
    """Bytes outside the device on a rank of the stage that holds most, and their seconds in a step."""

    host: float
    disk: float
    seconds: float


def shard_elements(case: Case, stage: int) -> float:
    """Return the elements of a rank's shard of what is trained."""
    experts = expert_elements(case, stage)
    return (trained_elements(case, stage) - experts) / case.shards + experts / case.expert_shards


def updated_elements(case: Case, stage: int) -> float:
    """Return those of a rank's shard whose state is on the device."""
    return shard_elements(case, stage) * (1 if case.offload == "none" else 1 - case.offload_fraction)


def offloaded(case: Case, machine: Machine) -> Offloaded:
    """Return the bytes and seconds of a case's offload; zeros where it has none."""
    hardware = machine.hardware
    stages = {0, case.pp // 2, case.pp - 1}
    most, trained = (max(count(case, stage) for stage in stages) for count in (stage_elements, trained_elements))
    held = max(shard_elements(case, stage) for stage in stages)
    mine = held * case.offload_fraction if case.offload != "none" else 0.0
    ranks = min(machine.cluster.gpus_per_node, case.world)
    if not mine:
        return Offloaded(0.0, 0.0, 0.0)
    on_disk = case.offload == "nvme"
    state = MASTER + MASTER * case.rule.state
    weights = most * held / trained * case.width if case.offload_weights else 0.0
    staged = min(case.bucket, trained) / case.shards * (GRADIENT + (state if on_disk else 0.0) + case.width)
    host = (0.0 if on_disk else state * mine) + weights + case.offload_buffers * (staged + PAGE)
    back = weights * case.weight_gathers if case.offload_weights else mine * case.width
    parts = [
        (mine * GRADIENT, hardware.host_link_gb), (back, hardware.host_link_gb),
        (mine * (GRADIENT + 2.0 * state + case.width) * ranks, hardware.host_bandwidth_gb),
    ]
    if on_disk:
        parts += [(state * mine * ranks, hardware.nvme_read_gb), (state * mine * ranks, hardware.nvme_write_gb)]
    # Buckets follow one another through the ring, so the slowest of these sets the pace.
    seconds = max(size / (rate * 1e9) if rate > 0 else 0.0 for size, rate in parts)
    return Offloaded(host, state * mine if on_disk else 0.0, seconds)


def host_problem(case: Case, machine: Machine) -> str:
    """Return why what is offloaded and swapped does not fit a node's host memory or disks, empty where it does or is
    unknown."""
    hardware, found = machine.hardware, offloaded(case, machine)
    ranks = min(machine.cluster.gpus_per_node, case.world)
    swapped = most_swapped(case)
    for what, size, limit in (
        ("host memory", found.host + swapped, hardware.host_memory_gb),
        ("local disks", found.disk, hardware.nvme_gb),
    ):
        if limit and size * ranks > limit * 1e9:
            what_takes = "swapped activations take" if size == swapped else "offloaded state takes"
            what_takes = "offloaded state and swapped activations take" if size > swapped > 0 else what_takes
            return (
                f"{what_takes} {size * ranks / 1e9:.1f} GB of a node's {what}, which has {limit:g} GB; use "
                "more nodes, a smaller offload.fraction"
                + (' or offload.optimizer = "nvme"' if what == "host memory" else "")
                + (", or activations.layers with fewer :swap" if swapped else "")
            )
    return ""
