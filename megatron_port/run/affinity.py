"""Cores of ranks that a process on each of several nodes has forked: each has a share of its own, near its GPU.

A launcher that starts every rank binds it (``srun --gpu-bind=closest --cpu-bind=cores``). Ranks that one process forks
inherit all of its cores, and the kernel moves them between sockets, away from their GPU and their memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from megatron_port.core.dist.rank import ProcessInfo
from megatron_port.core.io.logging import ranks_text
from megatron_port.run.device import Accelerators

FORKED = ("agent",)
"""Launchers whose ranks are bound: those of several nodes, which a job has for itself. A box may have other jobs."""


def parse_cores(text: str) -> frozenset[int]:
    """Return the numbers of the kernel's ``0-6,16-22``; empty text has none."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return frozenset(found)


def near_cores(identity: str, devices: Path = Path("/sys/bus/pci/devices")) -> frozenset[int]:
    """Return the cores of a GPU's NUMA node by its address (``run.device.identity_of``); empty: it is not known."""
    address = re.search(r"([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2})$", identity)
    if address is None:
        return frozenset()
    try:
        return parse_cores((devices / f"{address.group(1)}.0" / "local_cpulist").read_text())
    except (OSError, ValueError):
        return frozenset()


def shares(near: Sequence[frozenset[int]], free: frozenset[int]) -> list[frozenset[int]]:
    """Return the cores of each local rank: those near its device, divided in order among the ranks that are near them.

    Args:
        near: of each rank's device; empty: not known, then all are near.
        free: that the node's process may use. Ranks that are more than their cores share them.
    """
    own = [cores & free or free for cores in near]
    found = []
    for rank, cores in enumerate(own):
        ordered, peers = sorted(cores), [r for r, other in enumerate(own) if other == cores]
        place, count = peers.index(rank), len(peers)
        cut = ordered[len(ordered) * place // count : len(ordered) * (place + 1) // count]
        found.append(frozenset(cut if len(ordered) >= count else ordered))
    return found


def bind_near_device(info: ProcessInfo, gpus: Accelerators) -> str:
    """Bind this process, a forked rank, to its share of the cores. Return what was done for the log; empty: nothing."""
    if info.launcher not in FORKED or not gpus.count or not hasattr(os, "sched_setaffinity"):
        return ""
    devices = [gpus.describe(rank % gpus.count)[2] for rank in range(info.local_world_size)]
    # The process that forked it still has all of the node's; this one may be bound since an earlier start.
    free = frozenset(os.sched_getaffinity(os.getppid()))
    cores = shares([near_cores(identity) for identity in devices], free)[info.local_rank]
    os.sched_setaffinity(0, cores)
    return f"rank {info.rank} runs on cores {ranks_text(sorted(cores)).partition(' ')[2]} of {info.hostname}"
