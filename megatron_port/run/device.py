"""Choice of the device of a rank, of the library of its collectives, and of the priority of their streams."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch

from megatron_port.core.dist.groups import planned
from megatron_port.core.dist.mesh import REVERSE, Communicator, Topology
from megatron_port.core.dist.rank import DeviceInfo
from megatron_port.core.errors import EnvironmentFault
from megatron_port.core.io.variables import variables
from megatron_port.run.rendezvous import SHARE_DEVICES

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""
LARGEST_KEPT = 32 << 20
"""Bytes of the largest block that glibc takes from its heap."""


def keep_freed_memory(most: int = 1 << 30) -> bool:
    """Let glibc keep up to ``most`` freed bytes at the end of its heap: a step on a CPU then finds its memory mapped.

    By default glibc returns them once more than twice the largest freed block is free: at the quick start's size the
    next step met 3,700 page faults, 2 % of its processor time. Return whether glibc keeps them: another C library has
    no such setting, and ``MALLOC_TRIM_THRESHOLD_``, ``MALLOC_MMAP_THRESHOLD_``, ``GLIBC_TUNABLES`` are left as set.
    """
    if variables(("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Either setting ends what glibc finds out by itself, so both are needed.
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)) and bool(mallopt(M_TRIM_THRESHOLD, most))


@dataclass(frozen=True)
class Accelerators:
    """GPUs that this process may use, as torch reports them."""

    kind: str | None
    """cuda | rocm: what this torch was built for; None: CPU only."""
    count: int
    """Visible devices."""
    describe: Callable[[int], tuple[str, int, str]]
    """Name, memory (bytes) and identity of a device by index."""


def identity_of(properties: object) -> str:
    """Return a GPU's identity, unique on its host: ``UUID at DOMAIN:BUS:DEVICE``; empty if torch knows neither.

    A UUID alone does not: virtual GPUs and some drivers report one UUID for all (zeros, for instance), and ranks on
    different GPUs would be taken for ranks that share one. Partitions of a GPU have one address and different UUIDs.
    """
    uuid = str(getattr(properties, "uuid", "") or "")
    address = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in address:
        return uuid
    domain, bus, device = (int(part) for part in address)  # type: ignore[arg-type]
    return f"{uuid} at {domain:04x}:{bus:02x}:{device:02x}".strip()


def _describe(index: int) -> tuple[str, int, str]:
    properties = torch.cuda.get_device_properties(index)
    return properties.name, int(properties.total_memory), identity_of(properties)


def installed_accelerators() -> Accelerators:
    """Return the GPUs that torch reports."""
    kind = "rocm" if torch.version.hip else "cuda" if torch.version.cuda else None
    return Accelerators(kind, torch.cuda.device_count() if kind else 0, _describe)


def _absent(asked: str, gpus: Accelerators) -> str | None:
    """Why ``asked`` (cuda or rocm) cannot be had, or None."""
    if gpus.kind is None:
        return f"this torch ({torch.__version__}) is a CPU build; install a {asked} build of torch"
    if gpus.kind != asked:
        return f"this torch ({torch.__version__}) is built for {gpus.kind}; set backend.device = \"{gpus.kind}\""
    if not gpus.count:
        variable = "ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES" if asked == "rocm" else "CUDA_VISIBLE_DEVICES"
        return f"torch sees no GPU; check the driver (rocm-smi, nvidia-smi), the job's --gpus-per-node and {variable}"
    return None


def choose_device(
    device: str, *, local_rank: int = 0, local_world_size: int = 1, gpus: Accelerators | None = None,
    share: bool = False,
) -> DeviceInfo:
    """Return the device of a local rank: ``local_rank`` modulo the visible devices.

    A launcher may show each rank one device (``--gpus-per-task=1``) or all of the node; the modulus serves
    both. NCCL refuses two ranks on one GPU: ranks that share one use gloo, and only where that was asked for. Seen
    here only where several devices are visible and fewer than the local ranks; a process that sees one device cannot
    tell whether its neighbours see the same, and ``run.rendezvous.start`` settles it by
    :attr:`~megatron_port.core.dist.rank.DeviceInfo.identity`.

    Args:
        device: ``auto`` (a GPU if there is one) | ``cpu`` | ``cuda`` | ``rocm``.
        gpus: what is installed; None: ask torch.
        share: ``backend.share_devices``.

    Raises:
        EnvironmentFault: a GPU was asked for and cannot be used, or ranks would have to share one; the message says
            why and what to change.
    """
    gpus = gpus or installed_accelerators()
    if device not in ("auto", "cpu", "cuda", "rocm"):
        raise EnvironmentFault(f"backend.device = \"{device}\" is not one of auto, cpu, cuda, rocm")
    kind = (gpus.kind if gpus.count else None) if device == "auto" else device
    if kind in (None, "cpu"):
        why = "asked for" if device == "cpu" else _absent(gpus.kind or "cuda", gpus) or "no GPU"
        return DeviceInfo("cpu", torch.device("cpu"), "gloo", "cpu", psutil.virtual_memory().total, why)
    assert kind is not None
    reason = _absent(kind, gpus)
    if reason:
        raise EnvironmentFault(f"backend.device = \"{device}\", but {reason}")
    if 1 < gpus.count < local_world_size and not share:
        raise EnvironmentFault(
            f"{local_world_size} ranks were started on a node of {gpus.count} GPUs; start at most {gpus.count} there, "
            f"or {SHARE_DEVICES}"
        )
    index = local_rank % gpus.count
    name, memory, identity = gpus.describe(index)
    why = "asked for" if device == kind else f"auto: {gpus.count} visible"
    shared = 1 < gpus.count < local_world_size
    if shared:
        why += f"; {local_world_size} local ranks share {gpus.count} devices, so gloo"
    library = "gloo" if shared else "nccl"
    return DeviceInfo(kind, torch.device("cuda", index), library, name, memory, why, identity)


def describe_device(device: DeviceInfo, backend: str, world_size: int) -> str:
    """Return the log line with rank zero's device and the library of the collectives (``backend``)."""
    where = f"{device.torch_device} {device.name}" if device.is_gpu else "the CPU"
    if world_size == 1:
        carried = "none (1 process)"
    elif backend == "nccl":
        carried = f"{'RCCL' if device.kind == 'rocm' else 'NCCL'} (GPU tensors), gloo (CPU tensors)"
    else:
        carried = "gloo, through host memory: ranks share a GPU" if device.is_gpu else "gloo"
    return f"device: {where} ({device.why}); collectives: {carried}"


# Priority of the GPU streams on which NCCL or RCCL runs the collectives that are started ahead of their use.
#
# A GPU that has blocks of two kernels to place takes those of the stream with the higher priority first. A collective
# on a stream of normal priority therefore starts where the product beside it leaves multiprocessors free, which may
# be at that product's end: it then hides behind nothing. Where the next kernel waits for the collective (tensor-,
# context- and expert-parallel exchanges, messages between stages) it is to be first. Where nothing waits for it
# before the end of the step (gradients summed over replicas, weights gathered behind the passes) it is not: its
# blocks would only keep a product's from running, for no gain.
#
# A collective that the program waits for at once runs on the stream of the kernels around it (torch from 2.8 on), and
# priority says nothing about it.

URGENT = frozenset({"tp", "cp", "ep", "pp", REVERSE})
"""Purposes of communicators whose results the next kernel takes."""
FORCED = "TORCH_NCCL_HIGH_PRIORITY"
"""torch's own variable, which gives all groups high priority whatever their options say."""


def is_urgent(communicator: Communicator, asked: str) -> bool:
    """Return whether a communicator's streams have high priority under ``backend.collective_priority``.

    Under ``auto`` one that several purposes share is as urgent as the most urgent of them.
    """
    return asked == "high" or (asked == "auto" and not URGENT.isdisjoint(communicator.names))


def group_options(asked: str, backend: str, timeout_s: float) -> Callable[[Communicator], Any]:
    """Return what makes the options of a communicator's next group (``ParallelContext.create``).

    Each group takes options of its own, because torch writes into them, and warns on each rank where their timeout is
    not the group's. gloo has no streams, and gets None.
    """
    if backend != "nccl":
        return lambda communicator: None
    from torch.distributed import ProcessGroupNCCL  # only in a torch with NCCL or RCCL

    def options_of(communicator: Communicator) -> Any:
        options = ProcessGroupNCCL.Options(is_high_priority_stream=is_urgent(communicator, asked))
        options._timeout = timedelta(seconds=timeout_s)
        return options

    return options_of


def describe_policy(asked: str) -> str:
    """Return which kinds of groups have streams of which priority, for ``doctor``."""
    if variables((FORCED,)).get(FORCED, "0") not in ("", "0"):
        return f"all high: {FORCED} is set"
    if asked == "auto":
        return "auto: high for tensor-, context-, expert- and pipeline-parallel groups; normal for the others"
    return f"{asked} for all groups: asked for"


def describe_priority(asked: str, topology: Topology, *, two_way: bool) -> str:
    """Return which communicators of a layout have streams of which priority, for the line at the start of a run.

    ``two_way``: the stages have a second communicator, for gradients (``planned``).
    """
    if variables((FORCED,)).get(FORCED, "0") not in ("", "0"):
        return describe_policy(asked)
    by_kind: dict[bool, list[str]] = {True: [], False: []}
    for communicator in planned(topology, two_way=two_way):
        by_kind[is_urgent(communicator, asked)].append("=".join(communicator.names))
    said = [f"{'high' if urgent else 'normal'} {', '.join(names)}" for urgent, names in by_kind.items() if names]
    return f"{'; '.join(said)} (backend.collective_priority = \"{asked}\")"
