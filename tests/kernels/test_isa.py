"""The same device sources compiled for NVIDIA and AMD GPUs: what lies in the binaries."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def isa() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernels_isa", ROOT / "kernels" / "isa.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernels_isa"] = module
    spec.loader.exec_module(module)
    return module


Built = tuple[Path, list[Path]]
"""(library of one architecture, compiler logs of its objects)"""


def _built(build_script: ModuleType, target: str, arch: str) -> Built:
    """Skips where the compiler is missing."""
    try:
        library = build_script.plan(target, (arch,))[0]
        library.name = f"libmp_{target}-{arch}.so"
        out = ROOT / "build" / "isa"
        path = build_script.build([library], out)[0]
    except build_script.Missing as error:
        pytest.skip(f"kernels: {error}")
    return path, sorted((build_script.BUILD / library.name).glob("*.log"))


@pytest.fixture(scope="module")
def sm_90(build_script: ModuleType) -> Built:
    return _built(build_script, "cuda", "sm_90")


@pytest.fixture(scope="module")
def gfx90a(build_script: ModuleType) -> Built:
    return _built(build_script, "rocm", "gfx90a")


def _sources() -> set[str]:
    return {path.stem for path in (ROOT / "kernels" / "device").glob("*.cu")} - {"library"}


def test_nvcc_makes_sm_90_without_spills(sm_90: Built, isa: ModuleType) -> None:
    path, logs = sm_90
    assert isa.cuda_architectures(path) == {"sm_90"}
    kernels = [k for log in logs for k in isa.ptxas_kernels(log.read_text())]
    assert {k.arch for k in kernels} == {"sm_90"}
    assert {log.name.rpartition("-")[0] for log in logs if isa.ptxas_kernels(log.read_text())} == _sources()
    assert not [k for k in kernels if k.spilled], isa.summary(kernels)


def test_hipcc_makes_gfx90a_with_waves_of_64_without_spills(gfx90a: Built, isa: ModuleType) -> None:
    path, _ = gfx90a
    assert {arch for arch, _ in isa.rocm_code_objects(path)} == {"gfx90a"}
    readelf = isa.readelf_path()
    if readelf is None:
        pytest.skip("no llvm-readelf here (apt-get install llvm-15)")
    kernels = isa.rocm_kernels(path, readelf)
    assert {k.wave for k in kernels} == {64}
    assert not [k for k in kernels if k.spilled], isa.summary(kernels)


def test_both_compilers_see_the_same_kernels(sm_90: Built, gfx90a: Built, isa: ModuleType) -> None:
    logs, path = sm_90[1], gfx90a[0]
    readelf = isa.readelf_path()
    if readelf is None:
        pytest.skip("no llvm-readelf here (apt-get install llvm-15)")
    cuda = isa.readable(k.name for log in logs for k in isa.ptxas_kernels(log.read_text()))
    rocm = isa.readable(k.name for k in isa.rocm_kernels(path, readelf))
    assert cuda and sorted(cuda) == sorted(rocm)
