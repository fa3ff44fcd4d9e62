"""Section ``[offload]``: training state that lives in host memory or on a disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_port.core.config.ranges import Count, PathSetting, Share


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Training state outside of the device's memory (engine native; docs/offload.md). Changes no number."""

    optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Where masters and the rule's state are held and updated: none (on the device) | cpu (host memory, by the own
    kernels for CPUs, or torch's ops where the rule has none) | nvme (files in nvme_path, likewise)"""
    fraction: Share = 1.0
    """Share of the elements whose masters and moments are offloaded, by whole buckets, last layers first; the rest is
    updated on the device."""
    weights: Literal["none", "cpu"] = "none"
    """Where this rank's shards of the weights are held under ZeRO stage 3: none (on the device) | cpu (host memory,
    from which each gather copies them)"""
    buffers: Count = 4
    """Staging buffers in host memory, each as large as a bucket's share needs: the amount of data in flight."""
    nvme_path: PathSetting = ""
    """Folder on a fast local disk for nvme, with one file of fixed size per rank and kind of state. The files are
    scratch and vanish with the process; checkpoints hold the state."""
