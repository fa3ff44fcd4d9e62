"""Section ``[offload]``: training state that lives in host memory or on a disk, and what stands against it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_port.config.ranges import Count, PathSetting, Share

if TYPE_CHECKING:
    from megatron_port.config.schema import RunConfig


WHOLE_MATRICES = ("adafactor", "came", "sm3", "lamb", "muon")
"""Rules whose update of an element depends on others, which other ranks or buckets may have."""


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


def offload_problems(config: RunConfig) -> list[str]:
    """Return what in a configuration contradicts its ``[offload]``."""
    offload = config.offload
    if offload == OffloadConfig():
        return []
    asked = f'offload.optimizer "{offload.optimizer}"' if offload.optimizer != "none" else (
        f'offload.weights "{offload.weights}"' if offload.weights != "none" else "an [offload] section")
    if config.engine != "native":
        return [f'{asked} with engine "{config.engine}", which keeps all state on the device; use engine = "native"']
    if offload.optimizer == "none":
        return [f'{asked} with offload.optimizer "none", which offloads nothing; set offload.optimizer = "cpu" or '
                '"nvme", or leave the section out']
    out = []
    if not config.layout.zero_stage:
        out.append(f"{asked} with layout.zero_stage 0, where every replica would update all the state in its host's "
                   "memory; use zero_stage 1, 2 or 3")
    if config.optimizer.name in WHOLE_MATRICES:
        out.append(f'{asked} with optimizer.name "{config.optimizer.name}": the host updates one bucket after another, '
                   "and this rule needs whole matrices or sums over them; use one that updates elements or blocks "
                   '(adamw, adamw-bf16, adamw-8bit, lion, sgd, adagrad), or no offload')
    backend = config.backend
    without = f'backend.optimizer "{backend.optimizer}"' if backend.optimizer not in ("auto", "own") else (
        'backend.own_kernels "off"' if backend.own_kernels == "off" else "")
    if without and config.optimizer.name == "adamw":
        out.append(f'{asked} with optimizer.name "adamw" and {without}: the host updates by the own AdamW kernel; set '
                   'backend.optimizer = "auto" and backend.own_kernels = "auto" (make kernels builds them), or use no '
                   "offload")
    if config.precision.dtype == "fp64":
        out.append(f'{asked} with precision.dtype "fp64": state on the host is fp32; use fp32, bf16 or fp16')
    out += _weights_problems(config)
    return out + _nvme_problems(config)


def _weights_problems(config: RunConfig) -> list[str]:
    offload, out = config.offload, []
    if offload.weights == "cpu" and config.layout.zero_stage != 3:
        out.append(f'offload.weights "cpu" with layout.zero_stage {config.layout.zero_stage}, which keeps whole '
                   'weights on the device; use zero_stage 3, or weights = "none"')
    if offload.weights == "cpu" and offload.fraction < 1.0:
        out.append(f'offload.weights "cpu" with offload.fraction {offload.fraction:g}: weights on the host are updated '
                   'there; use fraction = 1, or weights = "none"')
    return out


def _nvme_problems(config: RunConfig) -> list[str]:
    offload, out = config.offload, []
    if offload.optimizer == "nvme":
        if not offload.nvme_path.strip():
            out.append('offload.optimizer "nvme" without offload.nvme_path; set it to a folder on a local disk')
        if config.checkpoint.asynchronous:
            out.append('offload.optimizer "nvme" with checkpoint.asynchronous: the copy that is saved beside training '
                       "would take host memory for all the state; set checkpoint.asynchronous = false")
    elif offload.nvme_path:
        out.append(f'offload.nvme_path with offload.optimizer "{offload.optimizer}", which writes no files; use '
                   'optimizer = "nvme", or leave the path out')
    return out
