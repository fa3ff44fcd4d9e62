"""Which device this rank computes on, and which library its collectives use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from megatron_port.errors import EnvironmentFault


@dataclass(frozen=True)
class DeviceInfo:
    """The device of one rank."""

    kind: str
    """cpu | cuda | rocm"""
    torch_device: torch.device
    comm_backend: str
    """nccl | gloo: of the groups that move tensors of this device."""
    name: str
    memory_bytes: int
    """Of the device; of the host for the CPU."""
    why: str
    """What led to this choice."""
    identity: str = ""
    """A GPU's unique name on its host; ``runtime.process_group.start`` takes it to see whether ranks share one."""

    @property
    def is_gpu(self) -> bool:
        """cuda or rocm."""
        return self.kind != "cpu"


@dataclass(frozen=True)
class Accelerators:
    """What torch says of the GPUs that this process may use."""

    kind: str | None
    """cuda | rocm: what this torch was built for; None: CPU only."""
    count: int
    """Visible devices."""
    describe: Callable[[int], tuple[str, int, str]]
    """Name, memory (bytes) and unique name of a device by index."""


def _describe(index: int) -> tuple[str, int, str]:
    properties = torch.cuda.get_device_properties(index)
    return properties.name, int(properties.total_memory), str(getattr(properties, "uuid", ""))


def installed_accelerators() -> Accelerators:
    """Ask torch."""
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
    device: str, *, local_rank: int = 0, local_world_size: int = 1, gpus: Accelerators | None = None
) -> DeviceInfo:
    """The device of a local rank: ``local_rank`` modulo the visible devices.

    A launcher may show each rank one device (``--gpus-per-task=1``) or all of the node; the modulus serves
    both. NCCL refuses two ranks on one GPU, so ranks that share one use gloo. Seen here only where several
    devices are visible and fewer than the local ranks; a process that sees one device cannot tell whether its
    neighbours see the same, and ``runtime.process_group.start`` settles it by :attr:`DeviceInfo.identity`.

    Args:
        device: ``auto`` (a GPU if there is one) | ``cpu`` | ``cuda`` | ``rocm``.
        gpus: what is installed; None: ask torch.

    Raises:
        EnvironmentFault: a GPU was asked for and cannot be used; the message says why.
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
    index = local_rank % gpus.count
    name, memory, identity = gpus.describe(index)
    why = "asked for" if device == kind else f"auto: {gpus.count} visible"
    shared = 1 < gpus.count < local_world_size
    if shared:
        why += f"; {local_world_size} local ranks share {gpus.count} devices, so gloo"
    library = "gloo" if shared else "nccl"
    return DeviceInfo(kind, torch.device("cuda", index), library, name, memory, why, identity)
