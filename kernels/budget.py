"""Instructions, bytes, registers and spills of every kernel on each architecture, beside a committed table.

    python kernels/budget.py                    compile what changed since the table was written; exit 1: over budget
    python kernels/budget.py --all gfx90a       compile everything, for these architectures
    python kernels/budget.py --update           compile what changed and write it into the tables

``kernels/budgets/ARCH.json`` holds the counts and a digest of each source with the headers it includes, comments left
out: a source of the digest of the table needs no compiler to be held to its budget. Counts are those of one compiler,
which the table names; another one is held to no spills alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import isa
from instructions import Loop, code_object_kernels, cubin_kernels, hot_loop, objdump_path

import build

TABLES = build.HERE / "budgets"
ARCHS = ("sm_80", "sm_90", "gfx90a")
SLACK = 1.02
"""Instructions of a loop may grow by this; bytes, spills not at all."""
_BYTES = {"float": 4, "int": 4, "short": 2, "signed char": 1, "mp::bf16": 2, "mp::f16": 2, "mp::NoWeight": 0}
_PIECES = ("forward_registers", "backward_registers", "rows_registers")
_ATTENTION = ("attention_forward", "attention_backward_queries", "attention_backward_keys")
_STORED = ("forward", "backward", "gelu_forward", "gelu_backward", "swiglu_forward", "gradient", "rotate",
           "split_backward")
_LOADED = ("statistics", "squares", "largest", "largest_of_columns")


@dataclass(frozen=True)
class Count:
    """Counts of one kernel; of its hot loop: instructions, and bytes of one thread and turn."""

    registers: int
    spilled: int
    wave: int
    """Lanes of a warp."""
    instructions: int
    loaded: int
    stored: int
    per_element: float
    """Instructions of the hot loop for an element of the op; 0 where the kernel is no shape class's own."""
    narrow: int = 0
    """Stores of one or two bytes in the hot loop."""


def sources() -> list[Path]:
    """Return the device sources that have kernels."""
    return sorted(p for p in (build.HERE / "device").glob("*.cu") if p.stem != "library")


def digest(source: Path) -> str:
    """Return the digest of a source and of the headers it includes, without comments, layout and the ABI's number."""
    files = [source, *build.included(source, build.headers_in("include", "device"))]
    text = "\n".join(re.sub(r"//[^\n]*|/\*.*?\*/|#define MP_ABI \d+", "", f.read_text(), flags=re.S) for f in files)
    return hashlib.blake2b(" ".join(text.split()).encode(), digest_size=12).hexdigest()


def read(arch: str) -> dict[str, dict[str, list[float]]]:
    """Return the table of an architecture."""
    found: dict[str, dict[str, list[float]]] = json.loads((TABLES / f"{arch}.json").read_text())
    return found


def stale(arch: str) -> list[Path]:
    """Return the sources that changed since the table of an architecture was written."""
    known = read(arch)["sources"] if (TABLES / f"{arch}.json").exists() else {}
    return [source for source in sources() if known.get(source.stem) != digest(source)]


# ------------------------------------------------------------------------------------------------ counting


def elements(name: str, loop: Loop, wave: int) -> float:
    """Return the elements that a thread handles in a turn of the hot loop, 0 where that is not known."""
    function, _, rest = name.removeprefix("mp::").partition("<")
    arguments = rest.removesuffix(">").split(", ")
    size = _BYTES.get(arguments[0], 0)
    if function in _PIECES:
        if arguments[1] in ("true", "false"):  # norms: a kind, then pieces of 16 bytes
            return 16 // size * int(arguments[2])
        return int(arguments[1]) * (8 if function == "rows_registers" else 1)
    if function in _ATTENTION:  # a warp's 16 rows of probabilities in a step
        step = 64 if function != "attention_backward_queries" and int(arguments[1]) <= 64 else 32
        return 16 * step / wave
    if function in _STORED:
        return (loop.stored or loop.loaded) / size
    if function == "swiglu_backward":
        return loop.stored / (2 * size)
    if function in _LOADED:
        return loop.loaded / size
    return {
        "adamw": loop.stored / (12 + size), "adamw_bf16": loop.stored / (8 + size), "lion": loop.stored / (8 + size),
        "adamw_8bit": (loop.stored - 8) / (6 + size), "cast": loop.stored, "add_gradients": loop.stored / 4,
        "hash_rows": loop.loaded / (size + 8),
    }.get(function, 0)


def count(source: Path, arch: str) -> dict[str, Count]:
    """Return the counts of a source's kernels, compiled for one architecture, device code alone.

    Raises:
        build.Missing: no compiler for it here.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "device.o"
        library = library_of(arch)
        if library.target == "cuda":
            said = build.run([*library.compile, "-cubin", str(source), "-o", str(out)])
            resources = {k.name: k for k in isa.ptxas_kernels(said)}
            found = dict(cubin_kernels(out.read_bytes(), arch))
        else:
            readelf, objdump = isa.readelf_path(), objdump_path()
            if readelf is None or objdump is None:
                raise build.Missing("no llvm-readelf and llvm-objdump here; apt-get install llvm-15")
            hip = next(s for s in library.sources if s.stem == source.stem)
            build.run([*library.compile, "--cuda-device-only", "-c", str(hip), "-o", str(out)], library.environment)
            resources = {k.name: k for k in isa.rocm_kernels(out, readelf)}
            found = dict(code_object_kernels(out, objdump))
    counts = {}
    for mangled, name in zip(found, isa.readable(found)):
        loop, kernel = hot_loop(found[mangled]), resources[mangled]
        of = elements(name, loop, kernel.wave)
        counts[f"{source.stem}: {name}"] = Count(
            kernel.registers, kernel.spilled, kernel.wave, loop.instructions, loop.loaded, loop.stored,
            round(loop.instructions / of, 2) if of else 0.0, loop.narrow)
    return counts


_libraries: dict[str, build.Library] = {}


def library_of(arch: str) -> build.Library:
    """Return how the library of one architecture is compiled."""
    if arch not in _libraries:
        target = "cuda" if arch.startswith("sm_") else "rocm"
        made = build.plan(target, (arch,))[0]
        if target == "cuda":  # PTX for later architectures is not counted, and cannot stand in a cubin
            made.compile = [f for f in made.compile if not f.startswith("-gencode")] + [f"-arch={arch}"]
        _libraries[arch] = made
    return _libraries[arch]


# ------------------------------------------------------------------------------------------------ the table


def over_budget(known: dict[str, list[float]], counts: dict[str, Count], same_compiler: bool) -> list[str]:
    """Return a sentence for each kernel that exceeds what the table has for it."""
    found = []
    for name, now in sorted(counts.items()):
        if name not in known:
            found.append(f"{name}: not in the table")
            continue
        budget = Count(*known[name])  # type: ignore[arg-type]
        if now.spilled > budget.spilled:
            found.append(f"{name}: spills {now.spilled}, budget {budget.spilled}")
        if same_compiler and now.instructions > SLACK * budget.instructions:
            found.append(f"{name}: {now.instructions} instructions in its loop, budget {budget.instructions}")
        if same_compiler and now.narrow > budget.narrow:
            found.append(f"{name}: {now.narrow} stores of one or two bytes, budget {budget.narrow}")
        if same_compiler and now.loaded + now.stored > budget.loaded + budget.stored:
            found.append(f"{name}: moves {now.loaded} + {now.stored} bytes a turn, "
                         f"budget {budget.loaded} + {budget.stored}")
    return found


def write(arch: str, counts: dict[str, Count]) -> None:
    """Write the table of an architecture, a kernel a line."""
    TABLES.mkdir(exist_ok=True)
    known = {name: list(asdict(c).values()) for name, c in sorted(counts.items())}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in known.items())
    digests = ",\n".join(f"  {json.dumps(s.stem)}: {json.dumps(digest(s))}" for s in sources())
    (TABLES / f"{arch}.json").write_text(
        f'{{"compiler": {json.dumps(library_of(arch).version)},\n'
        f' "columns": {json.dumps(list(Count.__dataclass_fields__))},\n'
        f' "sources": {{\n{digests}}},\n "kernels": {{\n{lines}}}}}\n')


def update(arch: str, chosen: Sequence[Path]) -> None:
    """Compile the chosen sources and write their counts in place of what the table has for them."""
    known = read(arch)["kernels"] if (TABLES / f"{arch}.json").exists() else {}
    new = {source.stem for source in chosen}
    counts = {name: Count(*row) for name, row in known.items()  # type: ignore[arg-type]
              if name.partition(":")[0] not in new}
    for part in _counted(arch, chosen):
        counts |= part
    write(arch, counts)


def check(arch: str, chosen: Sequence[Path]) -> list[str]:
    """Return what the chosen sources, compiled now, exceed in the table of an architecture."""
    table, found = read(arch), []
    for counts in _counted(arch, chosen):
        found += over_budget(table["kernels"], counts, library_of(arch).version == table["compiler"])
    return found


def _counted(arch: str, chosen: Sequence[Path]) -> list[dict[str, Count]]:
    library_of(arch)
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda source: count(source, arch), chosen))


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archs", nargs="*", default=[], help=f"default: {' '.join(ARCHS)}")
    parser.add_argument("--all", action="store_true", help="compile every source, also those of the table's digest")
    parser.add_argument("--update", action="store_true", help="write the tables")
    args = parser.parse_args(arguments)
    wrong = 0
    for arch in args.archs or ARCHS:
        try:
            chosen = sources() if args.all else stale(arch)
            if args.update:
                update(arch, chosen)
                continue
            found = check(arch, chosen)
        except build.Missing as error:
            print(f"{arch}: left out: {error}")
            continue
        print("\n".join([f"{arch}: {len(chosen)} sources compiled, {len(found)} over budget", *found]))
        wrong += len(found)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
