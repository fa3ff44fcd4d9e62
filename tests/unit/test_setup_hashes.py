"""HASHES=1 make setup: every pinned package has hashes, and pip is asked for nothing without them."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
HASHES = ROOT / "constraints" / "hashes"


def script(name: str) -> ModuleType:
    """A script as a module: ``setup`` is also the name of the project's setup.py."""
    spec = importlib.util.spec_from_file_location(f"scripts_{name}", ROOT / "scripts" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def pins(path: Path) -> set[str]:
    found = (line.partition(" ;")[0].strip(" \\") for line in path.read_text().splitlines())
    return {pin for pin in found if "==" in pin}


def test_every_pin_has_hashes() -> None:
    setup = script("setup_hashes")
    wanted = pins(ROOT / "constraints" / "common.txt") | pins(ROOT / "constraints" / "torch-2.13.0.txt")
    wanted |= set(script("setup").FILES_ONLY)
    assert pins(HASHES / "packages.txt") == wanted, "run: make lock"
    for path in HASHES.glob("*.txt"):
        for versions in setup.entries(path.read_text()).values():
            assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", entry) for entry in versions)


@pytest.mark.parametrize("index", ["", "/a/folder"])
def test_set_up_asks_an_index_only_by_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: str) -> None:
    setup = script("setup")
    run = setup.Setup(device="cpu", torch_version="2.13.0", torch_index=index, hashes=True)
    run.venv, run.cache = tmp_path / "venv", tmp_path
    (tmp_path / "setup").mkdir()
    calls: list[list[str]] = []
    monkeypatch.setattr(run, "call", lambda command, extra=None: calls.append(command))
    run.make_venv()
    run.pip("numpy")
    assert "--require-hashes" in calls[1] and "--no-deps" in calls[1]
    listed = (tmp_path / "setup" / "hashed.txt").read_text()
    assert "numpy==" in listed and "deepspeed==" not in listed and ("torch==2.13.0" in listed) == (not index)
    assert ("--no-index" in calls[2]) == (not index)
    monkeypatch.setattr(setup, "compiler_jobs", lambda: 1)
    run.build_wheel(tmp_path / "wheels" / "x", {}, {})
    assert calls[3][-3] == "--require-hashes" and "deepspeed==0.19.8" in Path(calls[3][-1]).read_text()


def test_hashes_change_the_environment_only_where_they_are_asked_for() -> None:
    setup = script("setup")
    keys = [[p.key for p in setup.Setup(device="cpu", torch_version="2.13.0", torch_index="", **more).phases()]
            for more in ({}, {"hashes": False}, {"hashes": True})]
    assert keys[0] == keys[1] and not set(keys[0]) & set(keys[2])
