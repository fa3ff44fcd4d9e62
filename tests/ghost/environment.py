"""An environment with the CUDA build of torch, beside the project's own, which has the CPU build."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("torch==2.13.0", "numpy", "safetensors", "xxhash", "psutil", "rich", "tiktoken", "pytest",
            "deepspeed==0.19.8")
"""What ``megatron-port train`` imports, and the session's tests of kernels (session.py)."""


class NoCudaTorch(Exception):
    """There is no CUDA build of torch to run; the message says what to do."""


@dataclass(frozen=True)
class Torch:
    """A CUDA build of torch and its interpreter."""

    python: Path
    libraries: Path
    version: str


def find_torch(python: Path) -> Torch:
    """Ask an interpreter for its torch. Raises NoCudaTorch."""
    code = "import torch; print(torch.__path__[0], torch.__version__, torch.version.cuda)"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise NoCudaTorch(f"{python} has no torch: {done.stderr.strip().splitlines()[-1]}")
    folder, version, cuda = done.stdout.split()
    if cuda == "None":
        raise NoCudaTorch(f"torch {version} of {python} is a CPU build; give --python of an environment with a CUDA "
                          "build, or set PIP_INDEX_URL to an index that has one")
    return Torch(python, Path(folder) / "lib", version)


def make_environment(root: Path) -> Path:
    """Make ``.cache/ghost`` (5 GB, 3 GB to download), unless it is there; its interpreter. Raises NoCudaTorch."""
    folder = root / ".cache" / "ghost"
    python, ready = folder / "bin" / "python", folder / "ready"
    if ready.exists():
        return python
    print(f"making {folder} with the CUDA build of torch: 3 GB to download", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    # A folder of wheels that the site prefers may hold the CPU build under the same version.
    environment = {k: v for k, v in os.environ.items() if k != "PIP_FIND_LINKS"} | {"PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run([str(python), "-m", "pip", "install", "-q", *PACKAGES], env=environment, stdout=sys.stdout)
    if done.returncode:
        raise NoCudaTorch("pip could not install the CUDA build of torch; its message is above")
    find_torch(python)
    ready.touch()
    return python
