"""``doctor``: the machine, the versions, the device, the provider of each op and why; what is wrong, with its remedy.

Exit 0 unless something that the run needs is broken (3). Nothing is changed,
and no other process is contacted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_port.errors import EXIT_ENVIRONMENT, EXIT_OK, PortError

if TYPE_CHECKING:
    from megatron_port.backend.device import DeviceInfo
    from megatron_port.config.schema import RunConfig

PYTHONS = ((3, 10), (3, 13))
OLDEST_TORCH = (2, 11)
OPTIONAL = {
    "transformers": "parity tests and Hugging Face import",
    "tensorboard": "TensorBoard events",
    "matplotlib": "the picture of the loss curve",
    "tiktoken": "GPT-2's tokenizer",
    "flash-attn": "attention on a GPU other than torch's",
    "apex": "fused norms and FusedAdam on a GPU",
}
COMPILERS = ("g++", "nvcc", "hipcc")
SLURM_TOOLS = ("srun", "sbatch", "scontrol")
SMALL_SHM = 64 << 20


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    section: str
    name: str
    value: str
    status: str = "ok"
    """ok | note (works, could be better) | wrong (the run would fail)"""
    remedy: str = ""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    from megatron_port.cli.main import add_run_options

    parser = subparsers.add_parser("doctor", help="print the machine, versions and providers, and what is wrong")
    add_run_options(parser, optional=True)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report for the run file given, or for the defaults. 0, or 3 if something needed is broken."""
    from megatron_port.cli.main import load_run
    from megatron_port.config.schema import RunConfig

    config = load_run(args).config if args.run_file else RunConfig()
    # Libraries print while they are imported; the report alone goes to stdout.
    with contextlib.redirect_stdout(sys.stderr):
        findings = examine(config)
    wrong = [f for f in findings if f.status == "wrong"]
    if args.json:
        print(json.dumps({"ok": not wrong, "findings": [asdict(f) for f in findings]}, indent=2))
    else:
        print(render(findings))
    return EXIT_ENVIRONMENT if wrong else EXIT_OK


def examine(config: RunConfig) -> list[Finding]:
    """All findings, in the order in which they are printed."""
    findings = [*_machine(), *_packages(config), *_tools()]
    if any(f.name == "torch" and f.status == "wrong" for f in findings):
        return findings
    findings += _launcher()
    if config.engine == "deepspeed":
        findings += _deepspeed()
    device, found = _devices(config)
    findings += found
    if device is not None:
        findings += _providers(config, device)
    return findings


def render(findings: list[Finding]) -> str:
    """The report as text: a table by section, then what needs attention."""
    lines: list[str] = []
    width = max(len(f.name) for f in findings)
    marks = {"ok": " ", "note": "~", "wrong": "!"}
    for i, f in enumerate(findings):
        if i == 0 or findings[i - 1].section != f.section:
            lines += [""] * bool(i) + [f.section]
        lines.append(f"{marks[f.status]} {f.name:<{width}}  {f.value}")
        if f.remedy:
            lines.append(f"  {'':<{width}}  → {f.remedy}")
    wrong, notes = (sum(f.status == s for f in findings) for s in ("wrong", "note"))
    state = f"{wrong} wrong (!)" if wrong else "nothing is wrong"
    return "\n".join([*lines, "", f"{state}; {notes} could be better (~)" if notes else state])


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _machine() -> Iterator[Finding]:
    """Host, processor, memory, shared memory, Python."""
    import psutil

    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    yield Finding("machine", "host", f"{platform.node()}, {system}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("machine", "cpu", f"{_cpu_model()}, {cores} of {os.cpu_count()} hardware threads usable")
    memory = psutil.virtual_memory()
    yield Finding("machine", "memory", f"{_gib(memory.total)}, {_gib(memory.available)} available")
    with contextlib.suppress(OSError):
        shm = shutil.disk_usage("/dev/shm")
        small = shm.free < SMALL_SHM
        yield Finding(
            "machine", "/dev/shm", f"{_gib(shm.total)}, {_gib(shm.free)} free", "note" if small else "ok",
            "NCCL and RCCL want more; in a container: --shm-size=8g or --ipc=host" if small else "",
        )
    version = sys.version_info[:2]
    good = PYTHONS[0] <= version <= PYTHONS[1]
    yield Finding(
        "versions", "python", f"{platform.python_version()} at {sys.executable}", "ok" if good else "wrong",
        "" if good else f"use Python {PYTHONS[0][0]}.{PYTHONS[0][1]} to {PYTHONS[1][0]}.{PYTHONS[1][1]}",
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _packages(config: RunConfig) -> Iterator[Finding]:
    """Versions; what is needed and missing is wrong, what is optional and missing is said."""
    torch_version = _version("torch")
    if torch_version is None:
        yield Finding("versions", "torch", "not installed", "wrong", "make install (or pip install torch)")
    else:
        numbers = tuple(int(n) for n in torch_version.split("+")[0].split(".")[:2] if n.isdigit())
        problem, remedy = "", ""
        try:
            import torch  # noqa: F401
        except Exception as error:  # a broken installation raises OSError, ImportError, RuntimeError, ...
            problem, remedy = f"; import fails: {error}", "install torch again; look for a mix of CPU and GPU builds"
        if not problem and numbers < OLDEST_TORCH:
            problem, remedy = "; too old", f"install torch {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or newer"
        yield Finding("versions", "torch", torch_version + problem, "wrong" if problem else "ok", remedy)
    for package in ("numpy", "psutil", "deepspeed"):
        found = _version(package)
        needed = package != "deepspeed" or config.engine == "deepspeed"
        if found is None and needed:
            other = ", or set engine = \"native\"" if package == "deepspeed" else ""
            yield Finding("versions", package, "not installed", "wrong", f"make install{other}")
        else:
            yield Finding("versions", package, found or "not installed (engine native does not need it)")
    for package, use in OPTIONAL.items():
        yield Finding("versions", package, _version(package) or f"not installed (optional: {use})")


def _first_line(command: list[str], match: str = "") -> str:
    """The first line of a tool's output (that contains ``match``); empty where it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    lines = [line.strip() for line in done.stdout.splitlines() if match in line]
    return lines[0] if lines else ""


def _tools() -> Iterator[Finding]:
    """Compilers, which only installation needs, and SLURM's commands."""
    for tool in COMPILERS:
        path = shutil.which(tool)
        version = _first_line([tool, "--version"], "release" if tool == "nvcc" else "") if path else ""
        text = f"{version} ({path})" if path else "not found (only needed to build ops ahead of time)"
        yield Finding("tools", tool, text)
    missing = [tool for tool in SLURM_TOOLS if shutil.which(tool) is None]
    if missing:
        yield Finding("tools", "slurm", f"{', '.join(missing)} not found (only needed on a cluster)")
    else:
        yield Finding("tools", "slurm", _first_line(["srun", "--version"]) or "srun does not answer")


def _launcher() -> Iterator[Finding]:
    """What a run started here would take for its rank and master."""
    from megatron_port.runtime.discovery import discover

    try:
        info = discover()
    except PortError as error:
        yield Finding("launcher", "discovery", "refused", "wrong", str(error))
        return
    yield Finding("launcher", info.launcher, f"rank {info.rank} of {info.world_size}, node {info.node_rank} of "
                  f"{info.num_nodes}, master {info.master_addr}:{info.master_port or '(any free port)'}")
    for conflict in info.conflicts:
        yield Finding("launcher", "conflict", conflict, "note")


def _deepspeed() -> Iterator[Finding]:
    """Whether it imports, for which accelerator, and which ops are prebuilt."""
    if _version("deepspeed") is None:
        return
    from megatron_port.backend.jit_guard import prebuilt_deepspeed_ops, prepare_deepspeed

    try:
        prepare_deepspeed()
    except PortError as error:
        yield Finding("deepspeed", "import", "fails", "wrong", str(error))
        return
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import accelerator_name

    ops = prebuilt_deepspeed_ops()
    yield Finding("deepspeed", "accelerator", f"{get_accelerator()._name}; installed for {accelerator_name or 'none'}")
    built = [op for op, done in ops.items() if done]
    yield Finding("deepspeed", "prebuilt ops", ", ".join(built) or "none")
    yield Finding("deepspeed", "not built", ", ".join(op for op in ops if op not in built) or "none")


def _devices(config: RunConfig) -> tuple[DeviceInfo | None, list[Finding]]:
    """The GPUs that torch sees, the chosen device and its collective library."""
    import torch

    from megatron_port.backend.device import choose_device, installed_accelerators

    gpus = installed_accelerators()
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    if torch.version.hip:
        build = f"HIP {torch.version.hip}"
    findings = [Finding("devices", "torch build", build)]
    for i in range(gpus.count):
        name, memory, _ = gpus.describe(i)
        findings.append(Finding("devices", f"gpu {i}", f"{name}, {_gib(memory)}"))
    try:
        device = choose_device(config.backend.device, gpus=gpus)
    except PortError as error:
        return None, [*findings, Finding("devices", "chosen", "none", "wrong", str(error))]
    findings.append(Finding("devices", "chosen", f"{device.kind} ({device.why}), {device.comm_backend}"))
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        findings.append(Finding("devices", "gloo", "not in this torch", "wrong", "install a torch built with gloo"))
    if device.comm_backend == "nccl" and not torch.distributed.is_nccl_available():
        findings.append(Finding("devices", "nccl", "not in this torch", "wrong", "install a torch with NCCL or RCCL"))
    return device, findings


def _providers(config: RunConfig, device: DeviceInfo) -> Iterator[Finding]:
    """One line an op: what serves it and why, or why what was asked for cannot."""
    import torch

    from megatron_port.backend import providers as choice

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
    dtype = dtypes.get(config.precision.dtype, torch.float32)
    model, tp = config.model, max(config.layout.tensor_parallel_size, 1)
    heads = (max(model.num_attention_heads // tp, 1), max(model.kv_heads // tp, 1), model.head_size)
    picks = {
        "attention": lambda: choice.choose_attention(
            config.backend, device, dtype, attention_dropout=model.attention_dropout, heads=heads
        )[1],
        "norm": lambda: choice.choose_norm(config.backend, device)[2],
        "optimizer": lambda: choice.choose_optimizer(config.backend, device, dtype, config.engine),
    }
    for op, pick in picks.items():
        try:
            row = pick()
        except PortError as error:
            yield Finding("providers", op, "none", "wrong", str(error))
            continue
        why, _, remedy = row.why.partition("; build it: ")
        yield Finding("providers", op, f"{row.provider} ({why})", "note" if remedy else "ok", remedy)
