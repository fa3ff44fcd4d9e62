"""Instructions of compiled kernels, and those of the loop in which a kernel spends its time.

NVIDIA: decoded from the cubin here, so no tool beyond nvcc is needed: only what moves global memory and branches has to
be told apart, and an instruction is 16 bytes. AMD: LLVM's objdump.

A kernel's *hot loop* is its smallest loop with at least half of the global memory traffic that any loop of it has, or,
where there are matrix instructions, half of those (the whole kernel, where it has no such loop). Its instructions are
counted as they stand: both sides of a condition, operands that a call may leave out, no instruction of a nested loop
twice.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import isa

_OPCODE = 0xFFF
_LOAD, _STORE, _BRANCH, _NOP, _MATRIX = 0x981, 0x986, 0x947, 0x918, 0x23C
_COPY = 0xFAE
"""From global to shared memory."""
_SASS_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 8, 6: 16}
"""By the size field of a load or store."""
_GCN = re.compile(r"^\s*([a-z]\w+).*?// ([0-9A-F]{12}): ([0-9A-F]{8})")
_GCN_MEMORY = re.compile(r"(?:global|flat)_(load|store)_(ubyte|sbyte|byte|ushort|sshort|short|dword)(x[234])?")
_GCN_BYTES = {"ubyte": 1, "sbyte": 1, "byte": 1, "ushort": 2, "sshort": 2, "short": 2, "dword": 4}


@dataclass(frozen=True)
class Instruction:
    """What is counted of one instruction."""

    at: int
    """Address in its section, in bytes."""
    loaded: int = 0
    """Bytes that one thread reads of global memory (or its caches)."""
    stored: int = 0
    target: int | None = None
    """Address that a branch goes to."""
    matrix: bool = False
    """Whether it multiplies matrices."""


@dataclass(frozen=True)
class Loop:
    """Instructions of a hot loop, and bytes that one thread moves in a turn of it."""

    instructions: int
    loaded: int
    stored: int
    narrow: int = 0
    """Stores of one or two bytes: compilers break a wide store up where its parts are chosen one by one."""


def hot_loop(instructions: list[Instruction]) -> Loop:
    """Return the loop in which the kernel spends its time; see the module's docstring."""
    loops = [[i for i in instructions if first <= i.at <= last] for first, last in _loops(instructions)]
    weigh = _products if any(i.matrix for i in instructions) else _moved
    most = max((weigh(loop) for loop in loops), default=0)
    hot = min((loop for loop in loops if most and 2 * weigh(loop) >= most), key=len, default=instructions)
    narrow = sum(0 < i.stored < 4 for i in hot)
    return Loop(len(hot), sum(i.loaded for i in hot), sum(i.stored for i in hot), narrow)


def _loops(instructions: list[Instruction]) -> list[tuple[int, int]]:
    """Return (first, last address) of each loop; branches back into one loop are one, wherever its blocks lie."""
    found: list[tuple[int, int]] = []
    for first, last in sorted((i.target, i.at) for i in instructions if i.target is not None and i.target <= i.at):
        while found and (crossing := next((f for f in found if f[0] == first or first <= f[1] < last), None)):
            found.remove(crossing)
            first, last = crossing[0], max(last, crossing[1])
        found.append((first, last))
    return found


def _moved(instructions: list[Instruction]) -> int:
    return sum(i.loaded + i.stored for i in instructions)


def _products(instructions: list[Instruction]) -> int:
    return sum(i.matrix for i in instructions)


# ------------------------------------------------------------------------------------------------ NVIDIA


def cubin_kernels(cubin: bytes, arch: str) -> Iterator[tuple[str, list[Instruction]]]:
    """(mangled name, instructions) of every kernel in a cubin."""
    number = int(re.sub(r"\D", "", arch))
    for name, kind, at, size in _sections(cubin):
        if name.startswith(".text.") and kind == 1:
            yield name.removeprefix(".text."), [
                found for place in range(0, size, 16)
                if (found := _sass(place, *struct.unpack_from("<QQ", cubin, at + place), number)) is not None
            ]


def _sections(elf: bytes) -> Iterator[tuple[str, int, int, int]]:
    """(name, type, offset, size) of an ELF file's sections."""
    headers = struct.unpack_from("<Q", elf, 40)[0]
    each, count, names = struct.unpack_from("<HHH", elf, 58)
    rows = [struct.unpack_from("<IIQQQQ", elf, headers + i * each) for i in range(count)]
    texts = rows[names][4]
    for name, kind, _, _, at, size in rows:
        yield elf[texts + name : elf.index(b"\0", texts + name)].decode(), kind, at, size


def _sass(at: int, low: int, high: int, number: int) -> Instruction | None:
    """One instruction of 128 bits; None for a no-op, of which only padding has many."""
    opcode = low & _OPCODE
    if opcode == _NOP:
        return None
    if opcode in (_LOAD, _STORE, _COPY):
        size = _SASS_BYTES[high >> 9 & 7]
        return Instruction(at, 0, size) if opcode == _STORE else Instruction(at, size, 0)
    if opcode == _BRANCH:
        distance = low >> 34 | (high & 0x3FFFF) << 30
        distance -= (distance >> 47) << 48
        if number >= 90:  # its lowest byte lies apart
            distance = distance << 8 | low >> 16 & 0xFF
        target = at + 16 + 4 * distance
        return Instruction(at, target=None if target == at else target)  # a branch to itself ends every kernel
    return Instruction(at, matrix=opcode == _MATRIX)


# ------------------------------------------------------------------------------------------------ AMD


def objdump_path() -> str | None:
    """LLVM's objdump: the distribution's, or ROCm's own."""
    names = ("llvm-objdump", *(f"llvm-objdump-{n}" for n in range(22, 13, -1)), "/opt/rocm/llvm/bin/llvm-objdump")
    return next((found for name in names if (found := shutil.which(name))), None)


def code_object_kernels(bundle: Path, objdump: str) -> Iterator[tuple[str, list[Instruction]]]:
    """(mangled name, instructions) of every kernel in an offload bundle of one architecture."""
    for _, image in isa.rocm_code_objects(bundle):
        with tempfile.NamedTemporaryFile(suffix=".elf") as file:
            file.write(image)
            file.flush()
            text = subprocess.run([objdump, "-d", file.name], capture_output=True, text=True, check=True).stdout
        parsed = [found for line in text.splitlines() if (found := _gcn(line)) is not None]
        for name, first, size in _functions(image):
            yield name, [i for i in parsed if first <= i.at < first + size]


def _functions(elf: bytes) -> Iterator[tuple[str, int, int]]:
    """(name, address, size) of the functions that a code object exports."""
    parts = {name: (at, size) for name, _, at, size in _sections(elf)}
    (symbols, size), (texts, _) = parts[".dynsym"], parts[".dynstr"]
    for place in range(symbols, symbols + size, 24):
        name, info, _, _, address, length = struct.unpack_from("<IBBHQQ", elf, place)
        if info & 0xF == 2:
            yield elf[texts + name : elf.index(b"\0", texts + name)].decode(), address, length


def _gcn(line: str) -> Instruction | None:
    found = _GCN.match(line)
    if found is None or found[1] == "s_nop":
        return None
    name, at = found[1], int(found[2], 16)
    if name.startswith(("s_branch", "s_cbranch")):
        words = struct.unpack("<h", struct.pack("<H", int(found[3], 16) & 0xFFFF))[0]
        return Instruction(at, target=at + 4 + 4 * words)
    if memory := _GCN_MEMORY.match(name):
        size = _GCN_BYTES[memory[2]] * int((memory[3] or "x1")[1:])
        return Instruction(at, size, 0) if memory[1] == "load" else Instruction(at, 0, size)
    return Instruction(at, matrix=name.startswith("v_mfma"))
