"""All that one process can say of its node, without a word to any other: ``node-NAME.json``."""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from megatron_port import __version__
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.io.variables import COMMUNICATION, VISIBLE, node_name, variables
from megatron_port.run.launchers import attempt_name
from megatron_port.tools.preflight.core import usable_cpus
from megatron_port.tools.preflight.exchange import core_rate, gpu_rates
from megatron_port.tools.preflight.node_file import (
    FORMAT,
    known,
    write_json,
)
from megatron_port.tools.preflight.probe import (
    DeviceProbe,
    Vendor,
    ask_vendor,
    counts,
    expected_devices,
    missing_devices,
    unmeasured,
)

if TYPE_CHECKING:
    pass




def node_file(folder: Path, node: str) -> Path:
    """Return where the check of ``node`` is written."""
    return folder / f"node-{node}.json"


def torch_probe() -> DeviceProbe:
    """Return the machine's own devices."""
    kind = "rocm" if torch.version.hip else "cuda" if torch.version.cuda else None
    found = variables(("SLURM_GPUS_ON_NODE", *VISIBLE))
    return DeviceProbe(kind, torch.cuda.device_count() if kind else 0, found)


def check_node(config: RunConfig, *, expect: int | None = None) -> dict[str, Any]:
    """Return the contents of the node's file. Nothing here judges: that needs the other nodes (``preflight.verdict``).

    Args:
        expect: devices that the node must have (None: ``cluster.gpus_per_node`` on a node with GPUs).
    """
    probe = torch_probe()
    begin = time.monotonic()
    vendor = ask_vendor(probe)
    busy: list[Vendor] = []
    gpus = gpu_rates(lambda: busy.append(ask_vendor(probe))) if probe.torch_count else []
    loaded = busy[0] if busy and busy[0].devices else vendor  # clocks and throttling count under load
    found = counts(probe, vendor)
    expected = expected_devices(config.backend.device, config.cluster.gpus_per_node, probe, vendor, expect)
    wanted = wanted_environment(config)
    return {
        "format": FORMAT,
        "node": node_name(),
        "hostname": platform.node(),
        "attempt": attempt_name(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "cpus": usable_cpus(),
        "core": asdict(core_rate()),
        "gpus": [asdict(g) for g in gpus],
        "device_counts": found,
        "expected_devices": expected,
        "missing_devices": missing_devices(found, expected, probe.environment),
        "unmeasured": unmeasured(found, sum(bool(g.tflops) for g in gpus), expected),
        "vendor": {"tool": loaded.tool, "fault": vendor.fault if expected else "",
                   "devices": [known(d) for d in loaded.devices]},
        "memory": {"total": psutil.virtual_memory().total, "available": psutil.virtual_memory().available},
        "disk": _disk(config),
        "shm": _space(Path("/dev/shm")),
        "versions": _versions(loaded),
        "environment": {**compare_environment(wanted, variables(tuple(wanted))),
                        "set": variables(prefixes=COMMUNICATION)},
        "seconds": round(time.monotonic() - begin, 2),
    }


def write_node(folder: Path, content: Mapping[str, Any]) -> Path:
    """Store a node's file. Raises EnvironmentFault if the folder cannot be written."""
    path = node_file(folder, str(content["node"]))
    write_json(path, dict(content))
    return path


def wanted_environment(config: RunConfig) -> dict[str, str]:
    """Return the variables that a job of this run exports: the cluster's, then the launch section's."""
    pairs = (text.partition("=") for text in (*config.cluster.environment, *config.launch.environment))
    return {name: value for name, _, value in pairs}


def compare_environment(wanted: Mapping[str, str], found: Mapping[str, str]) -> dict[str, Any]:
    """``missing``: name → value asked for; ``different``: name → [asked for, found]. A value with a {placeholder}
    is filled in on the node, so only its presence is compared."""
    return {
        "missing": {n: v for n, v in wanted.items() if n not in found},
        "different": {n: [v, found[n]] for n, v in wanted.items() if n in found and "{" not in v and found[n] != v},
    }


def _space(path: Path) -> dict[str, Any]:
    """Return total and free bytes of the file system of ``path`` or its nearest existing parent; {} if not known."""
    for place in (path, *path.parents):
        try:
            usage = shutil.disk_usage(place)
        except OSError:
            continue
        return {"path": str(place), "total": usage.total, "free": usage.free}
    return {}


def _disk(config: RunConfig) -> dict[str, Any]:
    """Return the node-local disk; a path that names the job is looked up as far as it is fixed."""
    parts: Sequence[str] = Path(config.cluster.local_disk).parts
    fixed = [p for i, p in enumerate(parts) if not any("{" in q for q in parts[: i + 1])]
    return _space(Path(*fixed) if fixed else Path("/tmp"))


def _versions(vendor: Vendor) -> dict[str, str]:
    driver = next((d.driver for d in vendor.devices if d.driver), "")
    found = {
        "python": platform.python_version(), "torch": torch.__version__, "megatron_port": __version__,
        "kernel": platform.release(), "cuda": torch.version.cuda or "", "rocm": torch.version.hip or "",
        "driver": driver,
    }
    return {name: str(value) for name, value in found.items() if value}


