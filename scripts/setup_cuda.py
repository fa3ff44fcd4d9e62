"""Which CUDA toolkit DEVICE=cuda builds with, and whether it is whole. Standard library only (setup.py).

Asked before anything is downloaded: a toolkit without headers or libraries, or of another release than torch's,
otherwise fails after minutes of downloading and compiling.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

HEADERS = ("cuda_runtime.h", "cuda_runtime_api.h", "cuda_fp16.h", "cuda_bf16.h", "crt/host_config.h")
"""Of nvcc's own release: the compiler reads them."""
LIBRARY_HEADERS = ("cublas_v2.h", "cublasLt.h", "cusparse.h", "cusolverDn.h")
"""That torch's headers include. pip's build of torch brings them along where the toolkit has none."""
HEADER_VARIABLES = ("CPATH", "CPLUS_INCLUDE_PATH")
"""Where a host compiler also looks; modules of clusters put CUDA's math libraries there."""


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit that can build torch extensions."""

    home: Path
    """For CUDA_HOME."""
    version: str
    """``13.0``."""
    borrowed: tuple[str, ...] = ()
    """Headers that must come from torch's pip packages."""


def candidates(environment: Mapping[str, str], nvcc: str | None) -> list[tuple[str, Path]]:
    """(where it was named, folder) of toolkits to try, in order. CUDA_HOME alone where it is set.

    ``nvcc``: the one in PATH. A wrapper script or a link somewhere else is asked where its toolkit is.
    """
    asked = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    if asked:
        return [("CUDA_HOME" if environment.get("CUDA_HOME") else "CUDA_PATH", Path(asked))]
    found = []
    if nvcc:
        found.append((f"{nvcc} in PATH", home_of(nvcc)))
    if not any(home.resolve() == Path("/usr/local/cuda").resolve() for _, home in found):
        found.append(("the default", Path("/usr/local/cuda")))
    return found


def home_of(nvcc: str) -> Path:
    """The toolkit's folder by what the compiler itself says (``TOP`` of ``--dryrun``), else two levels above it."""
    said = _output([nvcc, "--dryrun", "-x", "cu", "-E", os.devnull])
    top = re.search(r"^#\$ TOP=(.+?)\s*$", said, re.M)
    if top and Path(top.group(1)).is_dir():
        return Path(top.group(1)).resolve()
    return Path(nvcc).resolve().parent.parent


def version_of(nvcc: str | Path) -> str:
    """``13.0``; empty: it does not run."""
    found = re.search(r"release (\d+\.\d+)", _output([str(nvcc), "--version"]))
    return found.group(1) if found else ""


def inspect(home: Path, environment: Mapping[str, str], *, wanted: str, pip_headers: bool) -> Toolkit | str:
    """The toolkit at ``home``, or what is wrong with it.

    Args:
        wanted: CUDA release of torch's build, ``13.0``; empty: not known yet.
        pip_headers: torch comes from PyPI, with the headers of CUDA's math libraries.
    """
    nvcc = home / "bin" / "nvcc"
    if not nvcc.is_file():
        return "no bin/nvcc"
    version = version_of(nvcc)
    if not version:
        return "bin/nvcc does not run"
    problems = []
    if wanted and not compatible(version, wanted) and environment.get("DS_SKIP_CUDA_CHECK") != "1":
        problems.append(f"its release is {version}, torch's is {wanted}")
    missing = [name for name in HEADERS if not (home / "include" / name).is_file()]
    folders = [home / "include", *(Path(p) for v in HEADER_VARIABLES for p in environment.get(v, "").split(":") if p)]
    absent = [name for name in LIBRARY_HEADERS if not any((folder / name).is_file() for folder in folders)]
    if not pip_headers:
        missing += absent
    if missing:
        problems.append(f"no {', '.join(missing)} in include/")
    library = home / ("lib64" if (home / "lib64").is_dir() else "lib")  # as torch's extension builder chooses
    if not (library / "libcudart.so").exists():
        problems.append(f"no libcudart.so in {library.name}/")
    return "; ".join(problems) or Toolkit(home, version, tuple(absent))


def compatible(version: str, wanted: str) -> bool:
    """Whether DeepSpeed builds with nvcc ``version`` for a torch of ``wanted``: equal, or both of CUDA 11 or 12."""
    major = version.partition(".")[0]
    return version == wanted or (major in ("11", "12") and major == wanted.partition(".")[0])


def find_toolkit(
    environment: Mapping[str, str], nvcc: str | None, *, wanted: str, pip_headers: bool
) -> Toolkit | list[str]:
    """The first whole toolkit, or one line per candidate with what is wrong with it."""
    problems = []
    for source, home in candidates(environment, nvcc):
        found = inspect(home, environment, wanted=wanted, pip_headers=pip_headers)
        if isinstance(found, Toolkit):
            return found
        problems.append(f"{home} ({source}): {found}")
    return problems


def torch_cuda(version: str, index: str, pins: Path) -> str:
    """CUDA release of the torch that will be installed; empty: nothing says.

    Args:
        version: torch's, ``2.13.0``.
        index: TORCH_INDEX: its ``cu126``, or that of a wheel in the folder; empty: PyPI's build, by ``pins``.
        pins: the constraints of that version.
    """
    if index:
        names = [index]
        if os.path.isdir(index):
            names = [path.name for path in Path(index).glob(f"torch-{version}+cu*.whl")]
        return next((_release(m) for n in names for m in [re.search(r"\bcu(\d{2})(\d)\b", n)] if m), "")
    text = pins.read_text() if pins.is_file() else ""
    pinned = re.search(r"^nvidia-cuda-runtime(?:-cu\d+)?==(\d+\.\d+)\.", text, re.M)
    return pinned.group(1) if pinned else ""


def pip_folders(site: Path) -> list[Path]:
    """Headers that torch's pip packages brought into ``site`` (site-packages)."""
    return sorted(folder for folder in site.glob("nvidia/*/include") if folder.is_dir())


def with_headers(environment: Mapping[str, str], folders: Iterable[Path]) -> dict[str, str]:
    """``CPATH`` with ``folders`` behind what it has: a compiler's own ``-I``, the toolkit's, comes first."""
    parts = [*filter(None, [environment.get("CPATH", "")]), *map(str, folders)]
    return {"CPATH": ":".join(parts)} if parts else {}


def advice(problems: list[str], wanted: str, *, downloaded: bool = False) -> str:
    """The message for a machine without a whole toolkit. ``downloaded``: torch is there already."""
    release = f"CUDA {wanted}" if wanted else "torch's CUDA release"
    tried = "\n".join(f"  - {problem}" for problem in problems)
    first = "" if downloaded else "Nothing was downloaded. "
    return (
        f"DEVICE=cuda compiles DeepSpeed's op and our kernels; no whole toolkit of {release} was found:\n{tried}\n"
        f"  {first}Load the site's CUDA module, or install the toolkit of {release} and set\n"
        "  CUDA_HOME to its folder (with bin/, include/ and lib64/), or use docker/cuda.Dockerfile"
    )


def gpu_missing(device: str, root: Path = Path("/")) -> str:
    """Why this machine has no GPU for ``device``, by the driver's files; empty if it has, or needs none.

    Args:
        root: of the file system.
    """
    drivers = {"cuda": ("dev/nvidia[0-9]*", "dev/dxg"), "rocm": ("dev/kfd",)}  # dxg: under WSL
    names = drivers.get(device, ())
    if not names or any(True for name in names for _ in root.glob(name)):
        return ""
    shown = " or ".join(f"/{name}" for name in names)
    return f"DEVICE={device}, but this machine has no GPU that its driver shows (no {shown})"


def _release(match: re.Match[str]) -> str:
    return f"{match.group(1)}.{match.group(2)}"


def _output(command: list[str]) -> str:
    """Both streams of a command; empty if it does not start or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout + done.stderr


def in_path() -> str | None:
    """``nvcc`` of PATH."""
    return shutil.which("nvcc")
