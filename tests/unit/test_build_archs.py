"""Which architectures the kernels are compiled for where none is named: those that the compiler knows."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernels_build_archs", ROOT / "kernels" / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _compiler(folder: Path, name: str, said: str) -> None:
    program = folder / "bin" / name
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{said}\n")
    program.chmod(0o755)


def _nvcc(folder: Path, monkeypatch: pytest.MonkeyPatch, *known: str) -> None:
    codes = "\\n".join(known)
    _compiler(folder, "nvcc", f'[ "$1" = --list-gpu-code ] && printf "{codes}\\n" || echo "release 12.4"')
    monkeypatch.setenv("CUDA_HOME", str(folder))


def _codes(build: ModuleType, *archs: str) -> list[str]:
    (library,) = build.cuda_library(archs)
    return [flag.removeprefix("-gencode=arch=") for flag in library.compile if flag.startswith("-gencode")]


def test_a_compiler_that_knows_all(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Code of a major version for each of B200 (10.0, which B300's 10.3 runs too), RTX 50 (12.0), H100 and A100; PTX of
    sm_90 for what has none, such as 11.0."""
    _nvcc(tmp_path, monkeypatch, "sm_75", "sm_80", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121")
    assert _codes(build) == [*(f"compute_{n},code=sm_{n}" for n in (80, 90, 100, 120)), "compute_90,code=compute_90"]
    assert "without" not in capfd.readouterr().out


def test_what_an_older_compiler_does_not_know_is_left_out_and_named(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _nvcc(tmp_path, monkeypatch, "sm_52", "sm_80", "sm_86", "sm_90")
    assert _codes(build) == ["compute_80,code=sm_80", "compute_90,code=sm_90", "compute_90,code=compute_90"]
    assert f"cuda: without sm_100, sm_120, which {tmp_path}/bin/nvcc does not know" in capfd.readouterr().out


def test_what_is_named_is_compiled_for_whether_known_or_not(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _nvcc(tmp_path, monkeypatch, "sm_80")
    assert _codes(build, "sm_100") == ["compute_100,code=sm_100", "compute_100,code=compute_100"]
    assert _codes(build, "sm_90", "sm_103")[-1] == "compute_90,code=compute_90"


def test_a_compiler_that_knows_none(build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _nvcc(tmp_path, monkeypatch, "sm_35")
    with pytest.raises(build.Missing, match="compiles for none of sm_80, sm_90, sm_100, sm_120"):
        build.cuda_library(())


def test_amds_in_one_library_have_waves_of_64(build: ModuleType) -> None:
    assert {build.lanes_of(arch) for arch in build.ROCM_ARCHS} == {64}
    assert {"gfx90a", "gfx942", "gfx950"} <= set(build.ROCM_ARCHS)
