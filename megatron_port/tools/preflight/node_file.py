"""Files that checks of nodes write, and lists of hosts; read without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_port.core.errors import EnvironmentFault
from megatron_port.core.io.files import read_regular, write_output
from megatron_port.core.io.logging import redacted
from megatron_port.core.io.typed_json import LARGEST, Natural, WrongContent, parse_json
from megatron_port.run.launchers import compress_hosts, expand_hosts
from megatron_port.tools.preflight.core import VendorDevice

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


FORMAT = 1
REPORT, NETWORK = "preflight.json", "network.json"
GOOD, BAD, SELECTED = "good.txt", "bad.txt", "selected.txt"


def write_text(path: Path, text: str) -> None:
    """Write a whole file. Raises EnvironmentFault if the file system refuses."""
    write_output(path, text, advice="--out must be a folder that every node can write")


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write JSON as :func:`write_text` does, without secrets."""
    write_text(path, json.dumps(redacted(value), indent=1, ensure_ascii=False) + "\n")


def known(result: DataclassInstance) -> dict[str, Any]:
    """Return the fields of a result that hold something, for JSON."""
    return {name: value for name, value in asdict(result).items() if value not in (None, "", ())}


def read_json(path: Path) -> dict[str, Any]:
    """Return an object of this format. Raises EnvironmentFault for any other file; the message has which and why."""
    try:
        value = parse_json(read_regular(path, LARGEST))
    except (OSError, WrongContent) as error:
        raise EnvironmentFault(f"{path.name} cannot be read: {error}") from None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise EnvironmentFault(f"{path.name} is not of format {FORMAT}; it is another version's")
    return value


def write_hosts(path: Path, hosts: Sequence[str]) -> None:
    """Write one line for ``srun --nodelist=`` or ``--exclude=``; an empty file for no host."""
    write_text(path, compress_hosts(hosts) + "\n" if hosts else "")


def read_hosts(path: Path) -> list[str]:
    """Return the hosts of a list that :func:`write_hosts` wrote; none if it is not there."""
    try:
        return expand_hosts(read_regular(path, LARGEST).decode("utf-8", "replace").strip())
    except OSError:
        return []


def read_reasons(path: Path) -> dict[str, str]:
    """Return node → reason, from lines with a tab between them; none if it is not there."""
    try:
        lines = read_regular(path, LARGEST).decode("utf-8", "replace").splitlines()
    except OSError:
        return {}
    return {name: reason for name, tab, reason in (line.partition("\t") for line in lines) if tab}


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
    """Rates of one device (``preflight.exchange.GpuRate``)."""

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
