"""Build the kernel libraries and the torch binding ahead of time: ``make kernels``.

    python kernels/build.py                 what this machine has a compiler for; says what is left out and why
    python kernels/build.py cpu binding     these, or stop
    python kernels/build.py cpu --best      of the CPU's libraries only the one that this processor would load
    python kernels/build.py rocm --archs gfx90a
    python kernels/build.py cuda --checked  kernels stop at a token id or row index that is out of range

| target | compiler | from | gives |
|---|---|---|---|
| cpu | g++ or clang++ (CXX), OpenMP | cpu/*.cpp | libmp_cpu-LEVEL.so, one a level of the instruction set |
| cuda | nvcc | device/*.cu | libmp_cuda.so (sm_80, sm_90, sm_100, sm_120) |
| rocm | torch's hipify, then hipcc | device/*.cu | libmp_rocm.so (gfx90a, gfx942, gfx950) |
| binding | g++ against torch's headers | binding/*.cpp | libmp_binding.so |
| emulated | g++ | device/*.cu, emulator/ | libmp_emulated32.so and 64: device code on a CPU, for the tests |

Needs no torch but for ``binding`` (headers, libtorch_cpu) and ``rocm`` (hipify), both from the Python that runs this.
Builds for those of the architectures that the compiler knows, and prints the others.
A file is compiled again when it, a header that it includes, the compiler or a flag has changed. Exit 1: a build failed;
3: a compiler that was asked for is not there.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "megatron_port" / "_kernels"
BUILD = HERE.parent / "build" / "kernels"
TARGETS = ("cpu", "binding", "cuda", "rocm")
CUDA_ARCHS = ("sm_80", "sm_90", "sm_100", "sm_120")
"""Code for one also runs on later GPUs of its major version: sm_80 on the A10 and L40, sm_100 on the B300."""
PTX_ARCH = "sm_90"
"""PTX for GPUs without code here, which the driver compiles: of the earliest that has all instructions in use."""
ROCM_ARCHS = ("gfx90a", "gfx942", "gfx950")
# One library a level, the best that the processor has is loaded: -march=native would bind a build to its host.
CPU_LEVELS = {
    "x86_64": (("v2", "-march=x86-64-v2"), ("v3", "-march=x86-64-v3"), ("v4", "-march=x86-64-v4")),
}
_CHECKED = ("-DMP_CHECKED",)
WARNINGS = ("-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-unknown-pragmas")


class Missing(Exception):
    """A compiler or a header that a target needs is not here."""


class Failed(Exception):
    """A compiler stopped; its output is the message."""


@dataclass
class Library:
    """One shared object: how its sources are compiled and how it is linked."""

    name: str
    target: str
    compile: list[str]
    sources: list[Path]
    link: list[str]
    headers: list[Path]
    version: str
    environment: dict[str, str] = field(default_factory=dict)


def run(command: Sequence[str], environment: dict[str, str] | None = None) -> str:
    """Output of a command; Failed with it where it stops."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **(environment or {})}
    )
    if done.returncode:
        raise Failed(f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}")
    return done.stdout


def _compiler(*names: str, hint: str) -> str:
    for name in names:
        found = shutil.which(name) if name else None
        if found:
            return found
    raise Missing(f"no {' or '.join(n for n in names if n)} here; {hint}")


def headers_in(*folders: str) -> list[Path]:
    return sorted(p for f in folders for p in (HERE / f).iterdir() if p.suffix in (".h", ".cuh"))


def _cxx() -> str:
    return _compiler(os.environ.get("CXX", ""), "g++", "clang++", hint="apt-get install g++")


def _version(compiler: str, environment: dict[str, str] | None = None) -> str:
    """What ``--version`` says, in one line."""
    lines = [line.strip() for line in run([compiler, "--version"], environment).splitlines() if line.strip()]
    wanted = [line for line in lines if re.search(r"release|HIP version", line)]
    return " ".join(wanted or lines[:1])


# ------------------------------------------------------------------------------------------------ the targets


def levels_here() -> list[str]:
    """Levels that this processor can run, best first; the rule by which a run chooses its library."""
    spec = importlib.util.spec_from_file_location("cpu_levels", OUT.parent / "ext" / "kernels" / "cpu_levels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: list[str] = module.cpu_levels(module.processor_flags(), platform.machine())
    return found


def cpu_libraries(best: bool = False) -> list[Library]:
    """libmp_cpu-LEVEL.so; ``best``: that of this processor alone."""
    cxx = _cxx()
    sources = sorted((HERE / "cpu").glob("*.cpp"))
    headers = headers_in("include", "cpu")
    levels = CPU_LEVELS.get(platform.machine(), (("base", ""),))
    if best:
        levels = tuple(entry for entry in levels if entry[0] in levels_here()[:1])
    out = []
    for level, flag in levels:
        # No -ffast-math: NaN, infinity and the order of sums must be kept. These two only drop errno and traps.
        flags = [cxx, "-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", *WARNINGS,
                 *([flag] if flag else []), f'-DMP_TARGET="cpu {level}"', f"-I{HERE / 'include'}", f"-I{HERE / 'cpu'}"]
        out.append(Library(f"libmp_cpu-{level}.so", "cpu", flags, sources, [cxx, "-shared", "-fopenmp"], headers,
                           _version(cxx)))
    return out


def torch_folder() -> Path:
    """Where torch is installed, without importing it: a build in isolation cannot, but the files lie here."""
    candidates = [*sys.path, sysconfig.get_path("platlib"), sysconfig.get_path("purelib")]
    for folder in dict.fromkeys(candidates):
        torch = Path(folder or ".") / "torch"
        if (torch / "include" / "torch" / "csrc" / "stable" / "library.h").exists():
            return torch
    raise Missing("no torch with headers for its stable ABI here; install torch first, then pip install "
                  "--no-build-isolation")


def binding_library() -> list[Library]:
    """libmp_binding.so. The stable ABI of torch 2.10: later ones keep it."""
    cxx, torch = _cxx(), torch_folder()
    flags = [cxx, "-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-DTORCH_TARGET_VERSION=0x020a000000000000",
             f"-I{HERE / 'include'}", "-isystem", str(torch / "include")]
    link = [cxx, "-shared", f"-L{torch / 'lib'}", "-ltorch_cpu", "-ldl"]
    return [Library("libmp_binding.so", "binding", flags, sorted((HERE / "binding").glob("*.cpp")), link,
                    headers_in("include", "binding"), _version(cxx))]


def _known(target: str, compiler: str, wanted: Sequence[str], found: list[str]) -> list[str]:
    """Return the architectures that were found, and print the others. Raises Missing where none was."""
    if not found:
        raise Missing(f"{compiler} compiles for none of {', '.join(wanted)}")
    if left := [a for a in wanted if a not in found]:
        print(f"{target}: without {', '.join(left)}, which {compiler} does not know", flush=True)
    return found


def nvcc_path() -> str:
    """CUDA_HOME's nvcc, or that of PATH."""
    home = os.environ.get("CUDA_HOME", "")
    return _compiler(f"{home}/bin/nvcc" if home else "", "nvcc", hint="install the CUDA toolkit, or set CUDA_HOME")


def cuda_library(archs: Sequence[str], checked: bool = False) -> list[Library]:
    """libmp_cuda.so, ``checked``: with a look at indices; without ``archs``: for those of CUDA_ARCHS that nvcc knows.

    GPUs that have no code here get the PTX of PTX_ARCH or, where that is not among them, of the last.
    """
    nvcc = nvcc_path()
    if archs:
        chosen = list(archs)
    else:
        known = run([nvcc, "--list-gpu-code"]).split()
        chosen = _known("cuda", nvcc, CUDA_ARCHS, [a for a in CUDA_ARCHS if a in known])
    numbers = [a.removeprefix("sm_") for a in chosen]
    codes = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in numbers]
    ptx = (PTX_ARCH if PTX_ARCH in chosen else chosen[-1]).removeprefix("sm_")
    codes.append(f"-gencode=arch=compute_{ptx},code=compute_{ptx}")
    # Uncompressed, and with ptxas's report kept, so that isa.py can say what is in it.
    flags = [nvcc, "-std=c++17", "-O3", "-Xcompiler=-fPIC", "-lineinfo", "-Xptxas=-v", "-no-compress", *codes,
             f'-DMP_TARGET="{" ".join(chosen)}"', f"-I{HERE / 'include'}", f"-I{HERE / 'device'}",
             *_CHECKED[:checked]]
    return [Library("libmp_cuda.so", "cuda", flags, sorted((HERE / "device").glob("*.cu")),
                    [nvcc, "-shared", *codes], headers_in("include", "device"), _version(nvcc))]


def hipify(out: Path) -> list[Path]:
    """HIP sources of device/ in ``out``, made by torch's hipify; the .hip files."""
    code = (
        "import sys, contextlib\n"
        "from torch.utils.hipify.hipify_python import hipify\n"
        "source, target = sys.argv[1:]\n"
        "with contextlib.redirect_stdout(sys.stderr):\n"
        "    hipify(project_directory=source, output_directory=target, includes=['*'],\n"
        "           extensions=('.cu', '.cuh'), is_pytorch_extension=True)\n"
    )
    if out.exists():
        shutil.rmtree(out)  # hipify copies the tree only to where nothing is yet
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        run([sys.executable, "-c", code, str(HERE / "device"), str(out)])
    except Failed as error:
        raise Missing(f"torch's hipify does not run in {sys.executable}: {str(error)[-500:]}") from error
    made = sorted(out.glob("*.hip"))
    if len(made) != len(list((HERE / "device").glob("*.cu"))):
        raise Failed(f"hipify made {[p.name for p in made]} of {HERE / 'device'}")
    return made


def _compiles_for(hipcc: str, arch: str, environment: dict[str, str]) -> bool:
    """Whether hipcc knows the architecture, device library included."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "empty.hip"
        source.write_text("#include <hip/hip_runtime.h>\n__global__ void k(float* x) { x[threadIdx.x] = 1.0f; }\n")
        command = [hipcc, "-c", f"--offload-arch={arch}", str(source), "-o", str(Path(folder) / "empty.o")]
        return subprocess.run(command, capture_output=True, env={**os.environ, **environment}).returncode == 0


def lanes_of(arch: str) -> int:
    """Lanes of a warp as hipcc compiles for an AMD architecture: 64 on CDNA (gfx9), 32 on RDNA."""
    return 64 if arch.startswith("gfx9") else 32


def rocm_library(archs: Sequence[str], checked: bool = False) -> list[Library]:
    """libmp_rocm.so from hipified sources; without ``archs``: for those of ROCM_ARCHS that the compiler can.
    ``checked``: as :func:`cuda_library`."""
    home = os.environ.get("ROCM_HOME", os.environ.get("ROCM_PATH", ""))
    hipcc = _compiler(f"{home}/bin/hipcc" if home else "", "hipcc", "/opt/rocm/bin/hipcc",
                      hint="load the site's rocm module, or install hipcc")
    # Where nvcc is also found, hipcc would silently build for NVIDIA.
    environment = {"HIP_PLATFORM": "amd"}
    chosen = list(archs) or _known(
        "rocm", hipcc, ROCM_ARCHS, [a for a in ROCM_ARCHS if _compiles_for(hipcc, a, environment)])
    waves = {lanes_of(a) for a in chosen}
    if len(waves) > 1:
        raise Missing(f"{', '.join(chosen)} have warps of 32 and of 64 lanes, which one library cannot serve; build "
                      "them apart, with --archs and --out")
    folder = BUILD / "hip"
    sources = hipify(folder)
    targets = [f"--offload-arch={a}" for a in chosen]
    flags = [hipcc, "-std=c++17", "-O3", "-fPIC", f"-DMP_WARP={waves.pop()}", *targets,
             f'-DMP_TARGET="{" ".join(chosen)}"', f"-I{HERE / 'include'}", f"-I{folder}", *_CHECKED[:checked]]
    return [Library("libmp_rocm.so", "rocm", flags, sources, [hipcc, "-shared", *targets],
                    [*headers_in("include"), *sorted(folder.glob("*.cuh"))], _version(hipcc, environment),
                    environment)]


def emulated_libraries() -> list[Library]:
    """libmp_emulated32.so and libmp_emulated64.so."""
    cxx = _cxx()
    out = []
    for lanes in (32, 64):
        # -O1 takes 58 s of a core for both and the tests run no faster: what counts is inlined (MP_INLINE).
        flags = [cxx, "-std=c++17", "-Og", "-fno-strict-aliasing", "-fPIC", "-DMP_EMULATOR", f"-DMP_WARP={lanes}",
                 *WARNINGS, f'-DMP_TARGET="emulated {lanes}"', f"-I{HERE / 'include'}", f"-I{HERE / 'emulator'}",
                 f"-I{HERE / 'device'}", "-x", "c++"]
        out.append(Library(f"libmp_emulated{lanes}.so", "emulated", flags, sorted((HERE / "device").glob("*.cu")),
                           [cxx, "-shared"], headers_in("include", "device", "emulator"), _version(cxx)))
    return out


# ------------------------------------------------------------------------------------------------ building


def _digest(parts: Sequence[object]) -> str:
    return hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=12).hexdigest()


def sources_digest(library: Library) -> str:
    """Of everything a library is made from."""
    files = [*library.sources, *library.headers]
    # Without this machine's folders: the same sources built in two places are the same.
    flags = [re.sub(r"(-[IL])?/\S*/(kernels|torch)(?=/|$)", r"\1\2", f) for f in (*library.compile, *library.link)]
    return _digest([library.version, *flags, *(p.read_text() for p in files)])


def included(source: Path, headers: Sequence[Path]) -> list[Path]:
    """Those of the headers that the source includes, directly or through others; by file name."""
    found: list[Path] = []
    todo = [source]
    while todo:
        names = re.findall(r'^\s*#\s*include\s+"(?:[^"]*/)?([^"/]+)"', todo.pop().read_text(), re.M)
        new = [h for h in headers if h.name in names and h not in found]
        found += new
        todo += new
    return sorted(found)


def _compile(library: Library, source: Path, folder: Path) -> Path:
    """The object file of one source, compiled unless one of the same inputs is there."""
    headers = included(source, library.headers)
    key = _digest([library.version, *library.compile, source.read_text(), *(h.read_text() for h in headers)])
    target = folder / f"{source.stem}-{key}.o"
    if not target.exists():
        for old in [*folder.glob(f"{source.stem}-*.o"), *folder.glob(f"{source.stem}-*.log")]:
            old.unlink()
        temporary = target.with_suffix(f".{os.getpid()}.tmp.o")
        # In a release, names of files in messages are not those of the folder that it was built in.
        folders = [HERE.parent, *(Path(f).parent.parent for f in library.compile if f.endswith("/torch/include"))]
        plain = [f"-ffile-prefix-map={f}=." for f in folders] if os.environ.get("SOURCE_DATE_EPOCH") else []
        said = run([*library.compile, *plain, "-c", str(source), "-o", str(temporary)], library.environment)
        target.with_suffix(".log").write_text(said)  # ptxas's registers and spills
        os.replace(temporary, target)
    return target


def build(libraries: Sequence[Library], out: Path, jobs: int = 0) -> list[Path]:
    """Compile in parallel and link; each library appears whole, with its line in manifest.json."""
    out.mkdir(parents=True, exist_ok=True)
    pool = concurrent.futures.ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0)))
    with pool:
        work = {}
        for library in libraries:
            folder = BUILD / library.name
            folder.mkdir(parents=True, exist_ok=True)
            work[library.name] = [pool.submit(_compile, library, source, folder) for source in library.sources]
        made = []
        for library in libraries:
            objects = [str(future.result()) for future in work[library.name]]
            path, digest = out / library.name, sources_digest(library)
            if not path.exists() or read_manifest(out).get(library.name, {}).get("sources") != digest:
                temporary = path.with_suffix(f".{os.getpid()}.tmp")
                options = [o for o in library.link if not o.startswith("-l")]
                run([*options, "-o", str(temporary), *objects, *_libraries_of(library)],
                     library.environment)
                os.replace(temporary, path)
                _record(library, out, digest)
            made.append(path)
    return made


def _libraries_of(library: Library) -> list[str]:
    """-l options come after the objects that need them."""
    return [option for option in library.link if option.startswith("-l")]


def read_manifest(out: Path) -> dict[str, dict[str, str]]:
    """Library file → target, compiler, digest of its sources, date."""
    try:
        found: dict[str, dict[str, str]] = json.loads((out / "manifest.json").read_text())
        return found
    except (OSError, ValueError):
        return {}


def built_at() -> str:
    """Return the time of a build; with SOURCE_DATE_EPOCH that one, so that equal sources give equal files."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.gmtime(int(epoch)) if epoch.isdigit() else time.localtime())


def _record(library: Library, out: Path, digest: str) -> None:
    manifest = read_manifest(out)
    target = next((f for f in library.compile if f.startswith("-DMP_TARGET=")), f"=\"{library.target}\"")
    manifest[library.name] = {"target": target.split("=", 1)[1].strip('"'), "compiler": library.version,
                              "sources": digest, "built": built_at()}
    temporary = out / f"manifest.{os.getpid()}.tmp"
    temporary.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    os.replace(temporary, out / "manifest.json")


def plan(target: str, archs: Sequence[str], best: bool = False, checked: bool = False) -> list[Library]:
    """The libraries of a target; Missing where it cannot be built here."""
    makers: dict[str, Callable[[], list[Library]]] = {
        "cpu": lambda: cpu_libraries(best), "binding": binding_library, "cuda": lambda: cuda_library(archs, checked),
        "rocm": lambda: rocm_library(archs, checked), "emulated": emulated_libraries,
    }
    return makers[target]()


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, "emulated", []], help="default: all that can be built")
    parser.add_argument("--archs", default="", help="comma-separated: sm_90,sm_100 for cuda, gfx90a for rocm")
    parser.add_argument("--best", action="store_true", help="cpu: only the library that this processor would load")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the libraries")
    parser.add_argument("--checked", action="store_true", help="cuda, rocm: stop at indices that are out of range")
    parser.add_argument("--jobs", type=int, default=0, help="compilers at once (default: one a core)")
    args = parser.parse_args(arguments)
    archs = [a for a in re.split(r"[,; ]+", args.archs) if a]
    wrong = 0
    for target in args.targets or TARGETS:
        started = time.monotonic()
        try:
            made = build(plan(target, archs, args.best, args.checked), args.out, args.jobs)
        except Missing as error:
            print(f"{target}: left out: {error}", flush=True)
            wrong = wrong or (3 if args.targets else 0)
            continue
        except Failed as error:
            print(f"{target}: failed: {error}", flush=True)
            wrong = 1
            continue
        names = ", ".join(f"{path.name} ({path.stat().st_size >> 10} KiB)" for path in made)
        print(f"{target}: {names} in {time.monotonic() - started:.0f} s", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
