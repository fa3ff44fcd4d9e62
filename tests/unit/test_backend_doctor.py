"""The doctor: what it reports, in which form, and its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_port.cli import doctor
from megatron_port.config.schema import BackendConfig, RunConfig

NATIVE = RunConfig(engine="native")


def named(findings: list[doctor.Finding], section: str, name: str) -> doctor.Finding:
    return next(f for f in findings if (f.section, f.name) == (section, name))


def test_the_report_holds_machine_versions_device_and_providers() -> None:
    findings = doctor.examine(replace(NATIVE, backend=BackendConfig(device="cpu")))
    assert [f.section for f in findings] == sorted(
        (f.section for f in findings), key=["machine", "versions", "tools", "launcher", "devices", "providers"].index
    )
    assert named(findings, "versions", "torch").value.startswith("2.")
    assert named(findings, "providers", "attention").value.startswith("sdpa (")
    assert not [f for f in findings if f.status == "wrong"]


def test_what_is_wrong_has_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PYTHONS", ((3, 98), (3, 99)))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "many")
    config = replace(NATIVE, backend=BackendConfig(device="cpu", attention="flash_attn", norm="apex"))
    wrong = [f for f in doctor.examine(config) if f.status == "wrong"]
    assert [f.name for f in wrong] == ["python", "discovery", "attention", "norm"]
    assert all(f.remedy for f in wrong) and 'WORLD_SIZE="many"' in wrong[1].remedy


def test_a_missing_engine_is_wrong_only_for_its_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda p: None if p == "deepspeed" else real(p))
    assert named(list(doctor._packages(RunConfig())), "versions", "deepspeed").status == "wrong"
    assert named(list(doctor._packages(NATIVE)), "versions", "deepspeed").status == "ok"


@pytest.mark.parametrize(("version", "status"), [("2.4.1", "wrong"), ("2.11.0+cu130", "ok"), (None, "wrong")])
def test_old_torch_is_wrong(monkeypatch: pytest.MonkeyPatch, version: str | None, status: str) -> None:
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda p: version if p == "torch" else real(p))
    found = named(list(doctor._packages(NATIVE)), "versions", "torch")
    assert found.status == status and bool(found.remedy) == (status == "wrong")


def test_rendering_marks_and_counts() -> None:
    text = doctor.render([doctor.Finding("a", "x", "1"), doctor.Finding("b", "long", "2", "wrong", "mend it"),
                          doctor.Finding("b", "y", "3", "note", "tune it")])
    assert text.splitlines() == ["a", "  x     1", "", "b", "! long  2", "        → mend it", "~ y     3",
                                 "        → tune it", "", "1 wrong (!); 1 could be better (~)"]


@pytest.mark.parametrize(("overrides", "code"), [((), 0), (("backend.norm=\"apex\"",), 3)])
def test_json_is_all_that_stdout_gets(tmp_path: Path, overrides: tuple[str, ...], code: int) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text("[backend]\ndevice = \"cpu\"\n[data]\nsynthetic = true\n")
    sets: list[Any] = [x for o in overrides for x in ("--set", o)]
    done = subprocess.run(
        [sys.executable, "-m", "megatron_port", "doctor", str(run_file), "--json", *sets],
        cwd=Path(__file__).resolve().parents[2], env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=280,
    )
    assert done.returncode == code, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["ok"] is (code == 0)
    assert {"section", "name", "value", "status", "remedy"} == set(report["findings"][0])
