"""Section ``[offload]``: training state that lives in host memory or on a disk, and what stands against it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_port.core.config.conflicts import NO_ENGINE, Conflict, Rule, Table
from megatron_port.core.config.ranges import Count, PathSetting, Share

if TYPE_CHECKING:
    from megatron_port.core.config.schema import RunConfig


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


def _asked(config: RunConfig) -> str:
    """Return the setting that asks for an offload first."""
    o = config.offload
    name = next((n for n in ("optimizer", "weights") if getattr(o, n) != "none"), "")
    return f'offload.{name} "{getattr(o, name)}"' if name else "an [offload] section"


def _first(config: RunConfig) -> list[str]:
    """Return what leaves nothing more to say of an offload."""
    if config.engine != "native":
        return [f'{_asked(config)} with engine "{config.engine}", which keeps all state on the device; {NO_ENGINE}']
    return [f'{_asked(config)} with offload.optimizer "none", which offloads nothing; set offload.optimizer = "cpu" '
            'or "nvme", or leave the section out'] if config.offload.optimizer == "none" else []


def _host_kernel(config: RunConfig) -> list[str]:
    backend = config.backend
    without = f'backend.optimizer "{backend.optimizer}"' if backend.optimizer not in ("auto", "own") else (
        'backend.own_kernels "off"' if backend.own_kernels == "off" else "")
    return [f'{_asked(config)} with optimizer.name "adamw" and {without}: the host updates by the own AdamW kernel; '
            'set backend.optimizer = "auto" and backend.own_kernels = "auto" (make kernels builds them), or use no '
            "offload"] if without and config.optimizer.name == "adamw" else []


def _offloads(config: RunConfig) -> bool:
    """Return whether state is offloaded, by the engine that can."""
    return config.offload.optimizer != "none" and config.engine == "native"


CONFLICTS = (
    Table(on=lambda c: c.offload != OffloadConfig(), more=(_first,)),
    Table(asked='offload.optimizer "{c.offload.optimizer}"', on=_offloads, rows=(
        Conflict("layout.zero_stage", "where every replica would update all the state in its host's memory",
                 "use zero_stage 1, 2 or 3", refused=(0,)),
        Conflict("optimizer.name", "the host updates one bucket after another, and this rule needs whole matrices or "
                                   "sums over them", "use one that updates elements or blocks (adamw, adamw-bf16, "
                                   "adamw-8bit, lion, sgd, adagrad), or no offload", refused=WHOLE_MATRICES),
        Conflict("precision.dtype", "state on the host is fp32", "use fp32, bf16 or fp16", refused=("fp64",)),
        Rule(lambda c: c.offload.optimizer == "nvme" and not c.offload.nvme_path.strip(),
             "{asked} without offload.nvme_path; set it to a folder on a local disk"),
        Conflict("checkpoint.asynchronous", "the copy that is saved beside training would take host memory for all the "
                 "state", "set checkpoint.asynchronous = false", refused=(True,),
                 when=lambda c: c.offload.optimizer == "nvme"),
        Rule(lambda c: c.offload.optimizer != "nvme" and c.offload.nvme_path,
             'offload.nvme_path with {asked}, which writes no files; use optimizer = "nvme", or leave the path out'),
    ), more=(_host_kernel,)),
    Table(asked='offload.weights "cpu"', on=lambda c: _offloads(c) and c.offload.weights == "cpu", rows=(
        Conflict("layout.zero_stage", "which keeps whole weights on the device",
                 'use zero_stage 3, or weights = "none"', allowed=(3,)),
        Conflict("offload.fraction", "weights on the host are updated there", 'use fraction = 1, or weights = "none"',
                 when=lambda c: c.offload.fraction < 1.0),
    )),
)
