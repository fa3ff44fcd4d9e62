"""Build the ghost machine for the CUDA build of torch that an interpreter has: two libraries in a folder.

``libghost.so`` (LD_PRELOAD) answers for the CUDA runtime, cuBLAS and NCCL; ``libcuda.so.1`` (LD_LIBRARY_PATH) for the
driver. Calls that the sources here do not define, but this torch may make, get a stub that returns 0 and logs its
name as "unanswered": the list comes from the undefined symbols of torch's own libraries, so it fits every version.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
SOURCES = tuple(f"{name}.cpp" for name in (
    "events", "graphs", "kernels", "runtime", "compute", "pending", "products", "blas", "cublaslt", "messages", "nccl"
))
ANSWERED = re.compile(r"^(cuda[A-Z]|__cuda|cublas|nccl[A-Z])")
DRIVER = re.compile(r"^cu[A-Z]")
COMPUTES = re.compile(r"^(cublas([SDCZ][a-z]|\w*Ex)|nccl(All|Red|Gather|Scatter))")
NOT_OURS = re.compile(r"^cuFile")
TORCH = ("libtorch_cuda.so", "libc10_cuda.so", "libtorch_python.so", "libtorch_cuda_linalg.so", "libcaffe2_nvrtc.so")


def symbols(library: Path, kind: str, table: str = "-D") -> set[str]:
    """Names that a library defines (``kind`` "defined") or wants ("undefined"); ``table``: an option of nm."""
    command = ["nm", table, f"--{kind}-only", str(library)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return {line.split()[-1].split("@")[0] for line in lines if line.strip()}


def cuda_include() -> Path:
    """Folder of cuda_runtime_api.h. Raises FileNotFoundError."""
    roots = [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    for root in roots:
        if (root / "include" / "cuda_runtime_api.h").exists():
            return root / "include"
    raise FileNotFoundError("no cuda_runtime_api.h under /usr/local/cuda*; install the CUDA toolkit's headers")


def compile_object(source: Path, folder: Path, *flags: str) -> Path:
    """Compile a source with g++, unless its object in a folder is newer than it and every header here."""
    out = folder / f"{source.stem}.o"
    changed = max(path.stat().st_mtime for path in (source, *HERE.glob("*.h"), Path(__file__)))
    if not out.exists() or out.stat().st_mtime < changed:
        command = ["g++", "-c", "-O3", "-std=c++17", "-Wall", "-Wextra", "-fPIC", "-pthread", *flags, str(source)]
        subprocess.run([*command, "-o", f"{out}.new"], check=True)
        Path(f"{out}.new").replace(out)
    return out


def link(objects: list[Path], out: Path, *flags: str) -> None:
    """Link objects into a shared library that appears whole."""
    subprocess.run(["g++", "-shared", "-pthread", *flags, *map(str, objects), "-o", f"{out}.new"], check=True)
    Path(f"{out}.new").replace(out)


def stubs(names: set[str], log: bool) -> str:
    """C++ that answers 0 to each call."""
    head = '#include "events.h"\nextern "C" {\n' if log else 'extern "C" {\n'
    def note(name: str) -> str:
        if not log:
            return ""
        call = 'ghost_unanswered("{0}"); ' if COMPUTES.match(name) else 'ghost_event("unanswered", nullptr, "{0}"); '
        return call.format(name)

    body = [f"int {name}() {{ {note(name)}return 0; }}" for name in sorted(names)]
    return head + "\n".join(body) + "\n}\n"


def build(torch_lib: Path, folder: Path) -> None:
    """Write ``libghost.so`` and ``libcuda.so.1`` for the torch whose libraries are in ``torch_lib``."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted: set[str] = set()
    for name in TORCH:
        if (torch_lib / name).exists():
            wanted |= symbols(torch_lib / name, "undefined")
    flags = (f"-I{cuda_include()}", f"-I{HERE}")
    with ThreadPoolExecutor(2) as pool:
        own = list(pool.map(lambda name: compile_object(HERE / name, folder, *flags), SOURCES))
        driver = compile_object(HERE / "driver.cpp", folder)
    defined = set().union(*(symbols(path, "defined", "-g") for path in own))
    rest = write_changed(folder / "unanswered.cpp", stubs({n for n in wanted if ANSWERED.match(n)} - defined, log=True))
    link([*own, compile_object(rest, folder, *flags)], folder / "libghost.so")
    asked = {n for n in wanted if DRIVER.match(n) and not NOT_OURS.match(n)} | {"cuInit"}
    rest = write_changed(folder / "driver_rest.cpp", stubs(asked - symbols(driver, "defined", "-g"), log=False))
    link([driver, compile_object(rest, folder)], folder / "libcuda.so.1", "-Wl,-soname,libcuda.so.1")


def write_changed(path: Path, text: str) -> Path:
    """Write a file unless it has this text."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return path


def kernels_script(root: Path) -> ModuleType:
    """Return ``kernels/build.py`` as a module."""
    spec = importlib.util.spec_from_file_location("kernels_build", root / "kernels" / "build.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules["kernels_build"] = script
    spec.loader.exec_module(script)
    return script


def build_kernels(root: Path, folder: Path) -> None:
    """Write ``libmp_cuda.so`` from the kernels' device sources for a machine that computes: launches go through the
    ghost machine, which runs them on the emulator with the launch's grid, block and arguments."""
    script = kernels_script(root)
    (library,) = (made for made in script.emulated_libraries() if made.name.endswith("32.so"))
    flags = [flag.replace("-Og", "-O2") for flag in library.compile]
    flags.insert(flags.index("-x"), "-fno-gnu-unique")
    at = next(i for i, flag in enumerate(flags) if flag.startswith("-I"))
    flags.insert(at, f"-I{HERE / 'device'}")
    headers = [*library.headers, HERE / "device" / "emulator.h"]
    made = replace(library, name="libmp_cuda.so", compile=flags, headers=headers)
    script.__dict__["BUILD"] = root / "build" / "ghost"  # objects of other flags than those of make kernels
    script.build([made], folder)
    command = ["nm", str(folder / "libmp_cuda.so")]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    names = [line.split() for line in listed.splitlines()]
    lines = [f"{w[0]} {w[2]}" for w in names if len(w) == 3 and w[1] in "tTwW" and w[2].startswith("_ZN2mp")]
    (folder / "libmp_cuda.so.names").write_text("\n".join(lines) + "\n")
