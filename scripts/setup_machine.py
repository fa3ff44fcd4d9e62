"""What this machine has: Python, packages, disk, compilers; and a lock, so that one set-up runs at a time.

Standard library only (setup.py).
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ((3, 10), (3, 14))
APT_LINE = "sudo apt-get install -y git make g++ python3-dev python3-venv"
EXIT_ENVIRONMENT = 3
# Free disk in GB: for the CPU build of torch, and for the default one with CUDA. One compiler process, bytes.
DISK_GB, DISK_CUDA_GB = 4, 12
COMPILER_BYTES = 5 << 29


def fail(message: str) -> NoReturn:
    """End with one message for the user."""
    print(f"setup: {message}", file=sys.stderr)
    raise SystemExit(EXIT_ENVIRONMENT)


def missing_prerequisites(
    find_program: Callable[[str], str | None] = shutil.which,
    find_module: Callable[[str], object] = importlib.util.find_spec,
    include: str | None = None,
) -> list[str]:
    """Debian packages that this machine lacks; the arguments exist for the tests."""
    missing = [name for name in ("git", "make", "g++") if not find_program(name)]
    if not (Path(include or sysconfig.get_paths()["include"]) / "Python.h").is_file():
        missing.append("python3-dev")
    if not find_module("ensurepip"):
        missing.append("python3-venv")
    return missing


def check_machine(device: str, pointed: bool) -> None:
    """Everything that can be known in the first second: Python, packages, disk."""
    low, high = PYTHONS
    if not low <= sys.version_info[:2] <= high:
        fail(f"Python {platform.python_version()} at {sys.executable} is not supported; "
             f"name one from {low[0]}.{low[1]} to {high[0]}.{high[1]}, for example: make PYTHON=python3.12 setup")
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        print(f"setup: {platform.system()} on {platform.machine()} is untested; the pins are for Linux on x86_64")
    missing = missing_prerequisites()
    if missing:
        own = "" if sys.executable.startswith("/usr/bin/") else (
            f"\n  ({sys.executable} is not Debian's Python: its headers and ensurepip must come with it, "
            "or say PYTHON=/usr/bin/python3)")
        fail(f"missing: {', '.join(missing)}. Once, as root:\n  {APT_LINE}{own}")
    if device == "rocm" and not (shutil.which("hipcc") or Path("/opt/rocm/bin/hipcc").exists()):
        fail("DEVICE=rocm compiles for AMD GPUs and finds no hipcc in PATH or /opt/rocm: load the site's ROCm module")
    if (ROOT / ".venv" / "stamps" / "project.json").exists():
        return  # an update: the big files are there
    free = shutil.disk_usage(ROOT).free / 1e9
    if free < DISK_GB:
        fail(f"{free:.1f} GB free at {ROOT}, needed {DISK_GB} GB with a CPU torch, {DISK_CUDA_GB} GB with CUDA")
    if free < DISK_CUDA_GB and not pointed:
        print(f"setup: {free:.1f} GB free; a build of torch with CUDA needs {DISK_CUDA_GB} GB, "
              f"the CPU build {DISK_GB} GB (docs/install.md: TORCH_INDEX)")
    if device == "cpu" and shutil.which("nvidia-smi"):
        print("setup: a GPU is here; DEVICE=cuda makes an environment that uses it")


def gpu_architectures() -> str:
    """TORCH_CUDA_ARCH_LIST: as set, else this machine's GPUs, else A100 and H100."""
    if os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return os.environ["TORCH_CUDA_ARCH_LIST"]
    try:
        query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        answer = []
    return ";".join(sorted(set(answer))) or "8.0;9.0"


def processor_flags() -> str:
    """What -march=native binds a build to."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return " ".join(sorted(line.split(":", 1)[1].split()))
    except OSError:
        pass
    return platform.processor()


def compiler_jobs() -> int:
    """Compilers at once: one a core, while each has 2.5 GB."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(cores, memory // COMPILER_BYTES))


@contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Hold a lock file, so that two makes at once do not write one .venv."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("setup: another one is at work here; waiting for it", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
