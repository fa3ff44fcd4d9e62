"""Checks that need no device: host, versions, tools, launcher; and what ``doctor`` prints of all checks. No torch."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.errors import PortError
from megatron_port.core.io.logging import redact


@dataclass(frozen=True)
class CheckResult:
    """One line of the report."""

    section: str
    name: str
    value: str
    status: str = "ok"
    """ok | note (could be better) | slow (works, by a slower path or a build at run time) | wrong (a run would fail)"""
    remedy: str = ""


def strictly(findings: Sequence[CheckResult]) -> list[CheckResult]:
    """Return the same results, with what is slow called wrong."""
    return [replace(f, status="wrong") if f.status == "slow" else f for f in findings]


def render(findings: Sequence[CheckResult]) -> str:
    """Return the report as text: a table by section, then what needs attention."""
    lines: list[str] = []
    width = max(len(f.name) for f in findings)
    marks = {"ok": " ", "note": "~", "slow": "~", "wrong": "!"}
    for i, f in enumerate(findings):
        if i == 0 or findings[i - 1].section != f.section:
            lines += [""] * bool(i) + [f.section]
        lines.append(f"{marks[f.status]} {f.name:<{width}}  {f.value}")
        if f.remedy:
            lines.append(f"  {'':<{width}}  → {f.remedy}")
    wrong = sum(f.status == "wrong" for f in findings)
    notes = sum(f.status in ("note", "slow") for f in findings)
    state = f"{wrong} wrong (!)" if wrong else "nothing is wrong"
    return redact("\n".join([*lines, "", f"{state}; {notes} could be better (~)" if notes else state]))


PYTHONS = ((3, 10), (3, 14))
OLDEST_TORCH = (2, 11)
OPTIONAL = {
    "transformers": "parity tests and Hugging Face import",
    "tensorboard": "TensorBoard events",
    "tiktoken": "GPT-2's tokenizer",
    "tokenizers": "tokenizer.json files, and training a BPE",
    "sentencepiece": "SentencePiece tokenizers",
    "pyarrow": "Parquet and `datasets` as input",
    "zstandard": ".zst files as input",
    "wandb": "Weights & Biases",
    "mlflow-skinny": "MLflow",
    "flash-attn": "attention on a GPU other than torch's",
    "apex": "fused norms and FusedAdam on a GPU",
}
COMPILERS = ("g++", "nvcc", "hipcc")
SLURM_TOOLS = ("srun", "sbatch", "scontrol")
SMALL_SHM = 64 << 20


def gib(size: int) -> str:
    """Return a number of bytes in GiB, as text."""
    return f"{size / 2**30:.1f} GiB"


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine() -> Iterator[CheckResult]:
    """Check host, processor, memory, shared memory and Python."""
    import psutil

    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    yield CheckResult("machine", "host", f"{platform.node()}, {system}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield CheckResult("machine", "cpu", f"{_cpu_model()}, {cores} of {os.cpu_count()} hardware threads usable")
    memory = psutil.virtual_memory()
    yield CheckResult("machine", "memory", f"{gib(memory.total)}, {gib(memory.available)} available")
    with contextlib.suppress(OSError):
        shm = shutil.disk_usage("/dev/shm")
        small = shm.free < SMALL_SHM
        yield CheckResult(
            "machine", "/dev/shm", f"{gib(shm.total)}, {gib(shm.free)} free", "note" if small else "ok",
            "NCCL and RCCL want more; in a container: --shm-size=8g or --ipc=host" if small else "",
        )
    running = sys.version_info[:2]
    good = PYTHONS[0] <= running <= PYTHONS[1]
    yield CheckResult(
        "versions", "python", f"{platform.python_version()} at {sys.executable}", "ok" if good else "wrong",
        "" if good else f"use Python {PYTHONS[0][0]}.{PYTHONS[0][1]} to {PYTHONS[1][0]}.{PYTHONS[1][1]}",
    )


def version(package: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def packages(config: RunConfig) -> Iterator[CheckResult]:
    """Check versions; a missing package is wrong if it is needed, and noted if it is optional."""
    torch_version = version("torch")
    if torch_version is None:
        yield CheckResult("versions", "torch", "not installed", "wrong", "make setup (or pip install torch)")
    else:
        numbers = tuple(int(n) for n in torch_version.split("+")[0].split(".")[:2] if n.isdigit())
        problem, remedy = "", ""
        try:
            import torch  # noqa: F401
        except Exception as error:  # a broken installation raises OSError, ImportError, RuntimeError, ...
            problem, remedy = f"; import fails: {error}", "install torch again; look for a mix of CPU and GPU builds"
        if not problem and numbers < OLDEST_TORCH:
            problem, remedy = "; too old", f"install torch {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or newer"
        yield CheckResult("versions", "torch", torch_version + problem, "wrong" if problem else "ok", remedy)
    for package in ("numpy", "psutil", "deepspeed"):
        found = version(package)
        needed = package != "deepspeed" or config.engine == "deepspeed"
        if found is None and needed:
            extra = ", pip install 'megatron_port[deepspeed]', or set engine = \"native\""
            other = extra if package == "deepspeed" else ""
            yield CheckResult("versions", package, "not installed", "wrong", f"make setup{other}")
        else:
            yield CheckResult("versions", package, found or "not installed (engine native does not need it)")
    for package, use in OPTIONAL.items():
        yield CheckResult("versions", package, version(package) or f"not installed (optional: {use})")


def _first_line(command: list[str], match: str = "") -> str:
    """Return the first line of a tool's output (that contains ``match``); empty where it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    lines = [line.strip() for line in done.stdout.splitlines() if match in line]
    return lines[0] if lines else ""


def tools() -> Iterator[CheckResult]:
    """Check the compilers, which only installation needs, and SLURM's commands."""
    for tool in COMPILERS:
        path = shutil.which(tool)
        said = _first_line([tool, "--version"], "release" if tool == "nvcc" else "") if path else ""
        text = f"{said} ({path})" if path else "not found (only needed to build ops ahead of time)"
        yield CheckResult("tools", tool, text)
    missing = [tool for tool in SLURM_TOOLS if shutil.which(tool) is None]
    if missing:
        yield CheckResult("tools", "slurm", f"{', '.join(missing)} not found (only needed on a cluster)")
    else:
        yield CheckResult("tools", "slurm", _first_line(["srun", "--version"]) or "srun does not answer")


def launcher() -> Iterator[CheckResult]:
    """Check what a run started here would take for its rank and master."""
    from megatron_port.run.discovery import discover

    try:
        info = discover()
    except PortError as error:
        yield CheckResult("launcher", "discovery", "refused", "wrong", str(error))
        return
    yield CheckResult("launcher", info.launcher, f"rank {info.rank} of {info.world_size}, node {info.node_rank} of "
                  f"{info.num_nodes}, master {info.master_addr}:{info.master_port or '(any free port)'}")
    for conflict in info.conflicts:
        yield CheckResult("launcher", "conflict", conflict, "note")
