"""How many devices this node has, and how each is, asked of everyone who knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_port.core.io.variables import VISIBLE
from megatron_port.run.launchers import run_tool
from megatron_port.tools.preflight.core import (
    ROCM_ARGUMENTS,
    VendorDevice,
    nvidia_command,
    parse_amd_ecc,
    parse_nvidia,
    parse_rocm,
)

ABSENT, HUNG = 127, 124
Tool = Callable[[Sequence[str]], tuple[int, str]]
"""Command → exit code (127: not installed, 124: no answer) and output."""


def _system(command: Sequence[str]) -> tuple[int, str]:
    return run_tool(command, timeout_s=30.0)


@dataclass(frozen=True)
class DeviceProbe:
    """Sources of device counts; tests give others than the machine's."""

    torch_kind: str | None
    """cuda | rocm: what torch was built for; None: CPU only."""
    torch_count: int
    """Devices that torch may use in this process."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """SLURM_GPUS_ON_NODE and the variables that hide devices."""
    tool: Tool = _system
    devices: Path = Path("/dev")


@dataclass(frozen=True)
class Vendor:
    """Answer of the vendor's tool."""

    tool: str = ""
    """nvidia-smi | rocm-smi; empty: neither is installed."""
    devices: tuple[VendorDevice, ...] = ()
    fault: str = ""
    """Why there is a tool and no answer."""


def ask_vendor(probe: DeviceProbe) -> Vendor:
    """Ask the first tool that lists devices. A missing tool is no fault."""
    fault = Vendor()
    for name, ask in (("nvidia-smi", _ask_nvidia), ("rocm-smi", _ask_rocm)):
        code, text, devices = ask(probe)
        if devices:
            return Vendor(name, tuple(devices))
        if code != ABSENT and not fault.tool:
            lines = text.strip().splitlines() or ["no output"]
            fault = Vendor(name, fault=f"{name} lists no device (exit {code}): {lines[-1][:200]}")
    return fault


def _ask_nvidia(probe: DeviceProbe) -> tuple[int, str, list[VendorDevice]]:
    code, text = probe.tool(nvidia_command())
    if code not in (0, ABSENT, HUNG):
        code, text = probe.tool(nvidia_command(extra=False))
    return code, text, parse_nvidia(text) if code == 0 else []


def _ask_rocm(probe: DeviceProbe) -> tuple[int, str, list[VendorDevice]]:
    code, text = probe.tool(["rocm-smi", *ROCM_ARGUMENTS])
    devices = parse_rocm(text) if code == 0 else []
    if devices:
        answer, errors = probe.tool(["amd-smi", "metric", "--ecc", "--json"])
        ecc = parse_amd_ecc(errors) if answer == 0 else {}
        devices = [
            replace(d, ecc_uncorrected=ecc[d.index][0], ecc_corrected=ecc[d.index][1]) if d.index in ecc else d
            for d in devices
        ]
    return code, text, devices


def _device_files(folder: Path) -> int:
    """Count /dev/nvidia0 … of NVIDIA's driver; AMD's render nodes are shared with display adapters and not counted."""
    try:
        return sum(p.name[6:].isdigit() for p in folder.glob("nvidia*"))
    except OSError:
        return 0


def _slurm_count(environment: Mapping[str, str]) -> int | None:
    """Return the devices that SLURM gave this job on this node; ``4`` or ``gpu:mi250:4``."""
    last = environment.get("SLURM_GPUS_ON_NODE", "").rpartition(":")[2]
    return int(last) if last.isdigit() else None


def counts(probe: DeviceProbe, vendor: Vendor) -> dict[str, int]:
    """Return source → number of devices; silent sources are left out."""
    out: dict[str, int] = {}
    if vendor.devices or (vendor.tool and vendor.fault):
        out[vendor.tool] = len(vendor.devices)
    files, slurm = _device_files(probe.devices), _slurm_count(probe.environment)
    if files:
        out["/dev"] = files
    if slurm is not None:
        out["SLURM"] = slurm
    if probe.torch_kind:
        out["torch"] = probe.torch_count
    return out


def expected_devices(device: str, per_node: int, probe: DeviceProbe, vendor: Vendor, asked: int | None) -> int | None:
    """Return how many devices this node should have; None: this run counts none here.

    Args:
        device: ``backend.device``; with ``auto`` a node counts as one with GPUs if torch was built for them or
            the vendor's tool lists some.
        per_node: ``cluster.gpus_per_node``.
        asked: ``--expect-devices``.
    """
    if asked is not None:
        return asked
    if device == "cpu" or (device == "auto" and not probe.torch_kind and not vendor.devices):
        return None
    return per_node


def missing_devices(found: Mapping[str, int], expected: int | None, environment: Mapping[str, str]) -> list[str]:
    """Return what is wrong with the counts; empty: nothing. Sources that see the whole node are believed first.

    The vendor's tool sees every device of the node (or of the job's control group); torch only what the
    launcher lets this task see, so its number counts where nothing hides devices.
    """
    if expected is None or expected == 0:
        return []
    hidden = [n for n in VISIBLE if n in environment]
    tool = next((n for n in ("nvidia-smi", "rocm-smi") if n in found), "")
    problems = []
    if tool:
        if found[tool] < expected:
            problems.append(f"{found[tool]} of {expected} devices answer ({tool})")
    elif "torch" in found and not hidden and found["torch"] < expected:
        problems.append(f"{found['torch']} of {expected} devices answer (torch)")
    elif not found or not any(found.values()):
        problems.append(f"0 of {expected} devices found")
    if tool and "torch" in found and not hidden and found["torch"] < found[tool]:
        problems.append(f"torch can use {found['torch']} of the {found[tool]} devices that {tool} lists")
    if "/dev" in found and tool and found[tool] >= expected > found["/dev"]:
        problems.append(f"{found['/dev']} of {expected} device files are in /dev")
    return problems


def unmeasured(found: Mapping[str, int], measured: int, expected: int | None) -> str:
    """Return a note if this process could not measure all devices of the node; empty if it could."""
    if expected is None or not found.get("torch") or measured >= expected:
        return ""
    return (f"{measured} of {expected} devices were measured: this task sees no more; start the node check with one "
            f"task a node and all devices (srun --ntasks-per-node=1 --gpus-per-node={expected})")
