"""What device code a built library holds: ``python kernels/isa.py LIBRARY [COMPILER LOG ...]``.

ROCm: the code objects of the fat binary, read with LLVM's readelf: target, wave size, registers, spills of each kernel.
CUDA: the architectures of the cubins in the binary; registers and spills from ptxas's own report (-Xptxas=-v), since
the tool that would read them from the binary (cuobjdump) is not part of every toolkit.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ELF = b"\x7fELF"
BUNDLE = b"__CLANG_OFFLOAD_BUNDLE__"
EM_CUDA, EM_AMDGPU = 190, 224


@dataclass(frozen=True)
class Kernel:
    """Resources of one compiled kernel."""

    name: str
    arch: str
    """sm_90, gfx90a"""
    registers: int
    """A thread's (lane's) vector registers."""
    spilled: int
    """Bytes (CUDA) or registers (ROCm) that did not fit and go through memory; 0 is what a hot kernel must have."""
    wave: int
    """Lanes of a warp."""


def _machine(elf: bytes) -> int:
    return int(struct.unpack_from("<H", elf, 18)[0])


def cuda_architectures(library: Path) -> set[str]:
    """sm_NN of every cubin in an uncompressed fat binary (nvcc -no-compress)."""
    data = library.read_bytes()
    found = set()
    at = data.find(ELF, 1)
    while at >= 0:
        if len(data) > at + 52 and _machine(data[at:]) == EM_CUDA:
            flags = struct.unpack_from("<I", data, at + 48)[0]
            # CUDA 13 writes the architecture into the second byte of the flags, earlier ones into the first.
            number = flags >> 8 & 0xFF if struct.unpack_from("B", data, at + 8)[0] >= 8 else flags & 0xFF
            found.add(f"sm_{number}")
        at = data.find(ELF, at + 1)
    return found


def ptxas_kernels(log: str) -> list[Kernel]:
    """The kernels that ``ptxas -v`` reported."""
    out = []
    name = arch = ""
    spilled = 0
    for line in log.splitlines():
        if found := re.search(r"Compiling entry function '(\S+)' for '(\S+)'", line):
            (name, arch), spilled = found.groups(), 0
        elif found := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spilled = int(found[1]) + int(found[2])
        elif (found := re.search(r"Used (\d+) registers", line)) and name:
            out.append(Kernel(name, arch, int(found[1]), spilled, 32))
            name = ""
    return out


def rocm_code_objects(library: Path) -> Iterator[tuple[str, bytes]]:
    """(target such as gfx90a, ELF image) of every code object bundled in a library."""
    data = library.read_bytes()
    at = data.find(BUNDLE)
    while at >= 0:
        count = struct.unpack_from("<Q", data, at + 24)[0]
        place = at + 32
        for _ in range(count):
            offset, size, length = struct.unpack_from("<QQQ", data, place)
            name = data[place + 24 : place + 24 + length].decode()
            place += 24 + length
            image = data[at + offset : at + offset + size]
            if image.startswith(ELF):
                yield name.rpartition("--")[2] or name, image
        at = data.find(BUNDLE, at + 1)


def readelf_path() -> str | None:
    """LLVM's readelf: the distribution's, or ROCm's own."""
    names = ("llvm-readelf", *(f"llvm-readelf-{n}" for n in range(22, 13, -1)), "/opt/rocm/llvm/bin/llvm-readelf")
    return next((found for name in names if (found := shutil.which(name))), None)


def rocm_kernels(library: Path, readelf: str) -> list[Kernel]:
    """Every kernel of a library's code objects, from their metadata notes."""
    out = []
    for arch, image in rocm_code_objects(library):
        if _machine(image) != EM_AMDGPU:
            raise ValueError(f"{library}: a code object for {arch} is no AMDGPU image")
        with tempfile.NamedTemporaryFile(suffix=".elf") as file:
            file.write(image)
            file.flush()
            notes = subprocess.run([readelf, "--notes", file.name], capture_output=True, text=True, check=True).stdout
        for block in re.split(r"^  - \.(?:agpr_count|args):", notes, flags=re.M)[1:]:  # CDNA has the former first
            value = dict(re.findall(r"^\s*(\.\w+):\s+(\S+)\s*$", block, re.M))
            out.append(Kernel(
                value[".name"], arch, int(value[".vgpr_count"]),
                int(value[".vgpr_spill_count"]) + int(value[".sgpr_spill_count"]), int(value[".wavefront_size"]),
            ))
    return out


def readable(names: Iterable[str]) -> list[str]:
    """Demangled, without the anonymous namespace."""
    filt = shutil.which("c++filt")
    names = list(names)
    if not filt or not names:
        return names
    text = subprocess.run([filt], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return [re.sub(r"\(anonymous namespace\)::|^void ", "", line).partition("(")[0] for line in text.splitlines()]


def summary(kernels: list[Kernel]) -> str:
    """One line: counts by architecture, wave sizes, and the kernels that spill."""
    archs = sorted({k.arch for k in kernels})
    counts = ", ".join(f"{arch} {sum(k.arch == arch for k in kernels)}" for arch in archs)
    waves = "/".join(str(w) for w in sorted({k.wave for k in kernels}))
    bad = [k for k in kernels if k.spilled]
    spills = ", ".join(f"{n} ({k.arch})" for n, k in zip(readable(k.name for k in bad), bad)) or "none"
    return f"kernels: {counts}; wave {waves}; spilling: {spills}"


def main() -> int:
    """Print the kernels of a library."""
    library, logs = Path(sys.argv[1]), [Path(p) for p in sys.argv[2:]]
    readelf = readelf_path()
    kernels = [k for log in logs for k in ptxas_kernels(log.read_text())]
    if not logs and readelf:
        kernels = rocm_kernels(library, readelf)
    for name, k in sorted(zip(readable(k.name for k in kernels), kernels), key=lambda pair: pair[0]):
        print(f"{k.arch:<8} {k.registers:>4} registers {k.spilled:>4} spilled  {name}")
    print(summary(kernels) if kernels else f"architectures: {', '.join(sorted(cuda_architectures(library)))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
