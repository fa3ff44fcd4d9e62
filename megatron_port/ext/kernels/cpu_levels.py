"""Which levels of x86-64 this processor has. Standard library only: kernels/build.py loads this file by its path."""

from __future__ import annotations

from pathlib import Path

# What a processor must have for the levels of x86-64 (the System V ABI's names v2, v3, v4), best first.
_X86_LEVELS = (
    ("v4", {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    ("v3", {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "abm"}),
    ("v2", {"ssse3", "sse4_1", "sse4_2", "popcnt", "cx16"}),
)


def processor_flags() -> set[str]:
    """Return what this processor says that it has."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return set(line.partition(":")[2].split())
    except OSError:
        pass
    return set()


def cpu_levels(flags: set[str], machine: str) -> list[str]:
    """Return the levels of the CPU library that a processor with these flags can run, best first."""
    if machine != "x86_64":
        return ["base"]
    out: list[str] = []
    needed: set[str] = set()
    for level, own in reversed(_X86_LEVELS):
        needed |= own
        if needed <= flags:
            out.insert(0, level)
    return out
