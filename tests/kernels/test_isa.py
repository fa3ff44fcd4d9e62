"""The same device sources compiled for NVIDIA and AMD GPUs: what lies in the binaries, held to committed budgets.

Compiling all of it takes minutes. The tables in ``kernels/budgets`` carry a digest of each source, so what is compiled
here is one source that shows the way through both compilers, and those that changed since their table was written.
``make budgets`` compiles everything.
"""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import astuple, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SHOWN = "rotary"
"""The source that is compiled whatever its digest: it is small, and has loops, vectors and branches."""
ARCHS = ("sm_80", "sm_90", "gfx90a")


@pytest.fixture(scope="module")
def budget() -> ModuleType:
    sys.path.insert(0, str(ROOT / "kernels"))
    try:
        return importlib.import_module("budget")
    finally:
        sys.path.remove(str(ROOT / "kernels"))


@pytest.fixture(scope="module")
def isa(budget: ModuleType) -> ModuleType:
    return budget.isa


def test_a_hot_loop_is_the_smallest_with_half_of_the_traffic(budget: ModuleType) -> None:
    of = importlib.import_module("instructions").Instruction
    body = [of(0), of(16, loaded=4), of(32), of(48, loaded=16), of(64, stored=16), of(80, target=48), of(96, target=16),
            of(112), of(128, target=16), of(144)]
    assert astuple(budget.hot_loop(body)) == (3, 16, 16, 0)  # of 48..80; two branches to 16 are one outer loop
    body[3] = of(48, loaded=1)
    body[4] = of(64)
    assert astuple(budget.hot_loop(body)) == (8, 5, 0, 0)
    assert astuple(budget.hot_loop(body[:5])) == (5, 5, 0, 0)  # without a loop: the kernel
    body[4] = of(64, stored=2)
    assert budget.hot_loop(body).narrow == 1


def test_amd_lanes_are_exchanged_as_xor_would() -> None:
    """The control words in common.cuh, by the meaning that AMD's ISA gives them, in the sum of 64 lanes."""
    text = (ROOT / "kernels" / "device" / "common.cuh").read_text()
    word = {name: int(value, 16) for name, value in re.findall(r"\bk(Turn8|Turn4|Swap2|Swap1|Xor16) = (0x\w+)", text)}

    def source(name: str, lane: int) -> int:
        code = word[name]
        if name == "Xor16":  # ds_swizzle: and, or and exclusive or of the lane in its half
            return lane & 32 | (lane & code & 31 | code >> 5 & 31) ^ code >> 10 & 31
        if code >> 4 == 0x12:  # row_ror
            return lane & 48 | (lane - code) % 16
        return lane & ~3 | code >> 2 * (lane & 3) & 3  # quad_perm

    plain = mine = torch.randn(64, generator=torch.Generator().manual_seed(1))
    lanes = torch.arange(64)
    for mask, name in ((32, ""), (16, "Xor16"), (8, "Turn8"), (4, "Turn4"), (2, "Swap2"), (1, "Swap1")):
        plain = plain + plain[lanes ^ mask]
        mine = mine + mine[torch.tensor([source(name, lane) if name else lane ^ 32 for lane in range(64)])]
    assert torch.equal(mine, plain) and mine.unique().numel() == 1


def test_one_rocm_library_has_warps_of_one_size(budget: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget.build, "_compiler", lambda *names, hint: "hipcc")
    assert [budget.build.lanes_of(a) for a in ("gfx90a", "gfx942", "gfx1030", "gfx1100")] == [64, 64, 32, 32]
    with pytest.raises(budget.build.Missing, match="gfx90a, gfx1100 have warps of 32 and of 64 lanes"):
        budget.build.rocm_library(("gfx90a", "gfx1100"))


@pytest.mark.parametrize("arch", ARCHS)
def test_tables_are_of_these_sources(budget: ModuleType, arch: str) -> None:
    table = budget.read(arch)
    assert not budget.stale(arch), "compile them and write the tables anew: python kernels/budget.py --update"
    assert {name.partition(":")[0] for name in table["kernels"]} == set(table["sources"])
    counts = {name: budget.Count(*row) for name, row in table["kernels"].items()}
    assert set(counts) == set(budget.read("sm_90")["kernels"])  # every compiler sees the same kernels
    assert {c.wave for c in counts.values()} == {64 if arch.startswith("gfx") else 32}
    assert not {name: c.spilled for name, c in counts.items() if c.spilled}
    # What handles pieces of 16 bytes stores such pieces. Eight stores of two bytes took five times as long on an H200.
    pieces = [name for name in counts if re.search(r"<mp::(bf16|f16), ((true|false), )?8\b", name)]
    if arch.startswith("gfx"):  # hipcc 5.2 does it to two or four of fp16's softmax
        pieces = [name for name in pieces if not re.match(r"softmax: .*<mp::f16", name)]
    assert pieces and not {name: counts[name].narrow for name in pieces if counts[name].narrow}


@pytest.mark.parametrize("arch", ["sm_90", "gfx90a"])
def test_counts_stay_within_the_budgets(budget: ModuleType, arch: str) -> None:
    shown = next(s for s in budget.sources() if s.stem == SHOWN)
    try:
        counts = budget.count(shown, arch)
        assert not budget.check(arch, [s for s in budget.stale(arch) if s != shown])
    except budget.build.Missing as error:
        pytest.skip(f"kernels: {error}")
    table = budget.read(arch)
    known = {name: row for name, row in table["kernels"].items() if name.startswith(f"{SHOWN}:")}
    same = budget.library_of(arch).version == table["compiler"]
    assert counts.keys() == known.keys() and not budget.over_budget(known, counts, same)
    if same and shown not in budget.stale(arch):
        assert {name: list(astuple(c)) for name, c in counts.items()} == known
    wider = {name: [*row[:3], row[3] // 2, *row[4:]] for name, row in known.items()}
    assert len(budget.over_budget(wider, counts, True)) == len(known)  # twice the instructions would be found


@pytest.mark.parametrize("arch", ["sm_90", "gfx90a"])
def test_objects_link_and_hold_the_architecture(budget: ModuleType, isa: ModuleType, tmp_path: Path, arch: str) -> None:
    target = "cuda" if arch == "sm_90" else "rocm"
    try:
        library = budget.library_of(arch)
    except budget.build.Missing as error:
        pytest.skip(f"kernels: {error}")
    two = [s for s in library.sources if s.stem in (SHOWN, "library")]
    library = replace(library, name=f"libmp_{target}-{arch}-{SHOWN}.so", sources=two)
    path = budget.build.build([library], tmp_path)[0]
    found = isa.cuda_architectures(path) if target == "cuda" else {name for name, _ in isa.rocm_code_objects(path)}
    assert found == {arch}
