"""The installation, as far as it can be checked without doing it again.

``make test`` itself has just installed the environment that these tests run in; here are its parts:
what the prerequisite check says, when a phase runs again, what the wheel holds, what the pins are.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_port.core import errors

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def setup_script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))  # as when it is run
    spec = importlib.util.spec_from_file_location("setup_script", ROOT / "scripts" / "setup.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "setup_script", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def machine(setup_script: ModuleType) -> ModuleType:
    """What it asks about this machine."""
    return sys.modules["setup_machine"]


def test_prerequisites_are_named_by_their_package(machine: ModuleType, tmp_path: Path) -> None:
    def nothing(_: str) -> None:
        return None

    bare = machine.missing_prerequisites(nothing, nothing, str(tmp_path))
    assert bare == ["git", "make", "g++", "python3-dev", "python3-venv"]
    (tmp_path / "Python.h").touch()

    def all_but(name: str) -> str | None:
        return None if name == "g++" else "/usr/bin/" + name

    only = machine.missing_prerequisites(all_but, lambda _: 1, str(tmp_path))
    assert only == ["g++"]


def test_one_message_with_the_apt_line(
    machine: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "missing_prerequisites", lambda: ["g++", "python3-venv"])
    with pytest.raises(SystemExit) as stopped:
        machine.check_machine("cpu", True)
    assert stopped.value.code == errors.EXIT_ENVIRONMENT
    said = capsys.readouterr().err
    assert "g++, python3-venv" in said and said.count(machine.APT_LINE) == 1
    for text in ((ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()):
        assert machine.APT_LINE in text


def test_wrong_python_is_refused(
    machine: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine.sys, "version_info", (3, 15, 0))
    with pytest.raises(SystemExit) as stopped:
        machine.check_machine("cpu", True)
    assert stopped.value.code == errors.EXIT_ENVIRONMENT and "3.10 to 3.14" in capsys.readouterr().err


def make_setup(
    script: ModuleType, root: Path, ran: list[str], device: str = "cpu", broken: str = "", to_train: str = ""
) -> Any:
    """A Setup on an empty folder whose phases only say that they ran; ``broken`` is interrupted."""
    vars(script)["ROOT"] = root
    setup = script.Setup(device=device, torch_version="2.13.0", torch_index="", to_train=to_train)
    setup.toolkit = lambda build=None: None
    (root / ".cache" / "setup").mkdir(parents=True, exist_ok=True)
    real = setup.phases

    def phases() -> list[object]:
        chain = real()
        for phase in chain:
            def run(name: str = phase.name, made: tuple[Path, ...] = phase.made) -> None:
                if name == broken:
                    raise KeyboardInterrupt
                (root / ".venv").mkdir(exist_ok=True)
                for path in made:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.touch()
                ran.append(name)
            phase.run = run
        return chain

    setup.phases = phases
    return setup


def test_phases_resume_and_follow_their_inputs(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(setup_script, "check_machine", lambda *_, **__: None)
    (tmp_path / "constraints").mkdir()
    (tmp_path / "constraints" / "common.txt").write_text("numpy==1\n")
    (tmp_path / "pyproject.toml").write_text("a = 1\n")
    ran: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        make_setup(setup_script, tmp_path, ran, broken="deepspeed").all()
    assert ran == ["venv", "torch"]
    make_setup(setup_script, tmp_path, ran).all()
    assert ran == ["venv", "torch", "deepspeed", "project", "tests", "kernels", "levels"]
    ran.clear()
    make_setup(setup_script, tmp_path, ran).all()
    make_setup(setup_script, tmp_path, ran, to_train="native").all()
    assert ran == []
    (tmp_path / "pyproject.toml").write_text("a = 2\n")
    make_setup(setup_script, tmp_path, ran).all()
    assert ran == ["project", "tests"]
    ran.clear()
    make_setup(setup_script, tmp_path, ran, device="cuda").all()
    assert ran == ["deepspeed", "kernels"]
    ran.clear()
    (tmp_path / "constraints" / "common.txt").write_text("numpy==2\n")
    make_setup(setup_script, tmp_path, ran, device="cuda").all()
    assert ran == ["torch", "deepspeed", "project", "tests", "kernels", "levels"]
    ran.clear()
    (tmp_path / ".venv" / "stamps" / "torch.json").write_text("{")
    make_setup(setup_script, tmp_path, ran, device="cuda").all()
    assert ran == ["torch"]
    ran.clear()
    shutil.rmtree(tmp_path / "megatron_port")  # as git clean does that keeps .venv
    make_setup(setup_script, tmp_path, ran, device="cuda").all()
    assert ran == ["kernels", "levels"]


@pytest.mark.parametrize(("engine", "built"), [("native", []), ("deepspeed", ["deepspeed"])])
def test_a_quick_start_installs_what_its_engine_takes_and_make_test_the_rest(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: str, built: list[str]
) -> None:
    monkeypatch.setattr(setup_script, "check_machine", lambda *_, **__: None)
    ran: list[str] = []
    make_setup(setup_script, tmp_path, ran, to_train=engine).all()
    assert ran == ["venv", "torch", *built, "project", "kernels"]
    ran.clear()
    make_setup(setup_script, tmp_path, ran).all()
    assert ran == [*([] if built else ["deepspeed"]), "tests", "levels"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_kernels_are_compiled_for_no_other_device(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Whatever compilers are on PATH."""
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    setup = setup_script.Setup(device=device, torch_version="2.13.0", torch_index="")
    calls: list[list[str]] = []
    monkeypatch.setattr(setup, "call", lambda command, extra=None: calls.append(command[2:]))
    monkeypatch.setattr(setup, "torch_build", lambda: {"cuda": "13.0"})
    monkeypatch.setattr(setup, "toolkit", lambda build=None: argparse.Namespace(home="/usr/local/cuda"))
    setup.build_kernels()
    cuda = ["binding", "cpu", "cuda", "--best", "--archs", "sm_90"]
    assert calls == [["binding", "cpu", "--best"] if device == "cpu" else cuda]


def test_pins_are_exact_and_name_no_build() -> None:
    files = sorted((ROOT / "constraints").glob("*.txt"))
    assert [path.name for path in files if path.name.startswith("torch-")], files
    for path in files:
        for line in path.read_text().splitlines():
            if line.startswith("#"):
                continue
            assert re.match(r"^[a-z0-9][a-z0-9._-]*==[0-9][0-9a-z.]*( ; .*)?$", line), f"{path.name}: {line}"
            assert "+" not in line


def test_wheel_ships_the_configs(tmp_path: Path) -> None:
    """``pip install .`` gives the same short names as a checkout."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "configs", "megatron_port"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(copy)], check=True)
    built = subprocess.run([*command, "--wheel-dir", str(tmp_path), str(copy)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    shipped = {name.removeprefix("megatron_port/_configs/") for name in names if "/_configs/" in name}
    configs = ROOT / "configs"
    read = [*configs.glob("*/*.toml"), *configs.glob("kernels/*.json"), *configs.glob("tables/*.csv")]
    assert shipped == {str(path.relative_to(ROOT / "configs")) for path in read}
    assert "megatron_port/py.typed" in names and "megatron_port/cli/main.py" in names
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "megatron_port").rglob("*.py")}
    assert sources | {"megatron_port/_version.py"} == {name for name in names if name.endswith(".py")}
    assert {"megatron_port/tools/live/page.js"} <= set(names)


def test_the_pages_list_every_exit_code() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    for name, code in vars(errors).items():
        if name.startswith("EXIT_"):
            assert f"| {code} |" in page, f"{name} = {code} is not in the table of docs/troubleshooting.md"


def test_deepspeed_ops_are_built_in(tmp_path: Path) -> None:
    """A skipped op leaves pip content: ask DeepSpeed itself."""
    code = "import json; from deepspeed.git_version_info import installed_ops as o; print(json.dumps(o))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    built = json.loads(answer.stdout.splitlines()[-1])
    assert built["cpu_adam"]
