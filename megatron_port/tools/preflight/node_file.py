"""Types of what nodes leave in a preflight folder: ``node-NAME.json`` and ``network.json``. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_port.core.io.typed_json import Natural
from megatron_port.tools.preflight.vendor import VendorDevice


@dataclass(frozen=True, kw_only=True)
class NodeCore:
    """Rates of one core (``preflight.core.CoreRate``)."""

    gflops: float
    cpu_gflops: float
    share: float
    stopped: float
    conclusive: bool
    seconds: float


@dataclass(frozen=True, kw_only=True)
class NodeDevice:
    """Rates of one device (``preflight.compute.GpuRate``)."""

    index: Natural
    memory_total: Natural
    memory_free: Natural
    tflops: float
    fault: str


@dataclass(frozen=True, kw_only=True)
class NodeVendor:
    """Answer of the vendor's tool."""

    fault: str
    devices: tuple[VendorDevice, ...]


@dataclass(frozen=True, kw_only=True)
class NodeMemory:
    """Memory of the host, bytes."""

    total: Natural


@dataclass(frozen=True, kw_only=True)
class NodeSpace:
    """A file system, bytes."""

    path: str
    free: Natural


@dataclass(frozen=True, kw_only=True)
class NodeEnvironment:
    """Variables that are not as the run asks for."""

    missing: Mapping[str, str]
    different: Mapping[str, tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class NodeFile:
    """Fields that a node's file must have to be judged."""

    cpus: float
    core: NodeCore
    gpus: tuple[NodeDevice, ...]
    device_counts: Mapping[str, Natural]
    expected_devices: Natural
    missing_devices: tuple[str, ...]
    unmeasured: str
    vendor: NodeVendor
    memory: NodeMemory
    disk: Mapping[str, Any]
    """A :class:`NodeSpace`; empty: not known. ``shm`` too."""
    shm: Mapping[str, Any]
    versions: Mapping[str, str]
    environment: NodeEnvironment


@dataclass(frozen=True, kw_only=True)
class NetworkFile:
    """Fields that a report reads from ``network.json``."""

    bad: Mapping[str, str] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
