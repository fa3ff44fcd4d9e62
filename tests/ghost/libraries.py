"""Build the ghost machine for the CUDA build of torch that an interpreter has: two libraries in a folder.

``libghost.so`` (LD_PRELOAD) answers for the CUDA runtime, cuBLAS and NCCL; ``libcuda.so.1`` (LD_LIBRARY_PATH) for the
driver. Calls that the sources here do not define, but this torch may make, get a stub that returns 0 and logs its
name as "unanswered": the list comes from the undefined symbols of torch's own libraries, so it fits every version.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = ("events.cpp", "graphs.cpp", "kernels.cpp", "loader.cpp", "runtime.cpp", "blas.cpp", "nccl.cpp")
ANSWERED = re.compile(r"^(cuda[A-Z]|__cuda|cublas|nccl[A-Z])")
DRIVER = re.compile(r"^cu[A-Z]")
NOT_OURS = re.compile(r"^cuFile")
TORCH = ("libtorch_cuda.so", "libc10_cuda.so", "libtorch_python.so", "libtorch_cuda_linalg.so", "libcaffe2_nvrtc.so")


def symbols(library: Path, kind: str) -> set[str]:
    """Names that a library defines (``kind`` "defined") or wants ("undefined")."""
    command = ["nm", "-D", f"--{kind}-only", str(library)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return {line.split()[-1].split("@")[0] for line in lines if line.strip()}


def cuda_include() -> Path:
    """Folder of cuda_runtime_api.h. Raises FileNotFoundError."""
    roots = [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    for root in roots:
        if (root / "include" / "cuda_runtime_api.h").exists():
            return root / "include"
    raise FileNotFoundError("no cuda_runtime_api.h under /usr/local/cuda*; install the CUDA toolkit's headers")


def compile_library(sources: list[Path], out: Path, *flags: str) -> None:
    """Compile sources into a shared library with g++."""
    command = ["g++", "-O1", "-std=c++17", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread", *flags,
               *map(str, sources), "-o", str(out)]
    subprocess.run(command, check=True)


def stubs(names: set[str], log: bool) -> str:
    """C++ that answers 0 to each call."""
    head = '#include "events.h"\nextern "C" {\n' if log else 'extern "C" {\n'
    note = 'ghost_event("unanswered", nullptr, "{0}"); ' if log else ""
    body = [f"int {name}() {{ {note.format(name)}return 0; }}" for name in sorted(names)]
    return head + "\n".join(body) + "\n}\n"


def build(torch_lib: Path, folder: Path) -> None:
    """Write ``libghost.so`` and ``libcuda.so.1`` for the torch whose libraries are in ``torch_lib``."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted: set[str] = set()
    for name in TORCH:
        if (torch_lib / name).exists():
            wanted |= symbols(torch_lib / name, "undefined")
    include, own = f"-I{cuda_include()}", [HERE / name for name in SOURCES]
    compile_library(own, folder / "libghost.so", include)
    lacking = {n for n in wanted if ANSWERED.match(n)} - symbols(folder / "libghost.so", "defined")
    (folder / "unanswered.cpp").write_text(stubs(lacking, log=True))
    compile_library([*own, folder / "unanswered.cpp"], folder / "libghost.so", include, f"-I{HERE}")
    driver = {n for n in wanted if DRIVER.match(n) and not NOT_OURS.match(n)} | {"cuInit"}
    compile_library([HERE / "driver.cpp"], folder / "libcuda.so.1", "-Wl,-soname,libcuda.so.1")
    driver -= symbols(folder / "libcuda.so.1", "defined")
    (folder / "driver_rest.cpp").write_text(stubs(driver, log=False))
    compile_library([HERE / "driver.cpp", folder / "driver_rest.cpp"], folder / "libcuda.so.1",
                    "-Wl,-soname,libcuda.so.1")


def build_kernels(root: Path, folder: Path, archs: tuple[str, ...] = ("sm_90",)) -> str:
    """Link the project's CUDA kernels with the shared runtime, so that this machine answers their launches; build them
    as ``make kernels`` does where they are not. Return why there are none, or nothing."""
    spec = importlib.util.spec_from_file_location("kernels_build", root / "kernels" / "build.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules["kernels_build"] = script
    spec.loader.exec_module(script)
    try:
        (library,) = script.cuda_library(archs)
        script.build([library], script.OUT)
        shared = replace(library, link=[*library.link[:2], "-cudart", "shared", *library.link[2:]])
        script.build([shared], folder / "kernels")
    except (script.Missing, script.Failed) as error:
        return str(error)
    return ""


def main() -> int:
    """``python libraries.py FOLDER [--torch-lib FOLDER]``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch-lib", type=Path, required=True, help="torch/lib of the CUDA build")
    a = parser.parse_args()
    build(a.torch_lib, a.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
