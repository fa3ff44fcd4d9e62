"""The doctor: what it reports, in which form, and its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_port.cli import doctor, doctor_backend, doctor_machine
from megatron_port.cli.doctor_machine import CheckResult, render, strictly
from megatron_port.cli.main import main
from megatron_port.core.config.schema import BackendConfig, PrecisionConfig, RunConfig
from megatron_port.core.dist.rank import DeviceInfo
from megatron_port.run.device import Accelerators

NATIVE, DEEPSPEED = RunConfig(engine="native"), RunConfig(engine="deepspeed")


def named(findings: list[CheckResult], section: str, name: str) -> CheckResult:
    return next(f for f in findings if (f.section, f.name) == (section, name))


def test_the_report_holds_machine_versions_device_and_providers() -> None:
    findings = doctor.examine(replace(NATIVE, backend=BackendConfig(device="cpu")))
    order = ["machine", "versions", "tools", "launcher", "devices", "kernels", "providers"]
    assert [f.section for f in findings] == sorted((f.section for f in findings), key=order.index)
    assert named(findings, "versions", "torch").value.startswith("2.")
    assert named(findings, "providers", "attention").value.startswith(("own (", "sdpa ("))
    assert not [f for f in findings if f.status == "wrong"]


def test_what_is_wrong_has_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine, "PYTHONS", ((3, 98), (3, 99)))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "many")
    config = replace(NATIVE, backend=BackendConfig(device="cpu", attention="flash_attn", norm="apex"))
    wrong = [f for f in doctor.examine(config) if f.status == "wrong"]
    assert [f.name for f in wrong] == ["python", "discovery", "attention", "norm"]
    assert all(f.remedy for f in wrong) and 'WORLD_SIZE="many"' in wrong[1].remedy


def test_a_missing_engine_is_wrong_only_for_its_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor_machine.version
    monkeypatch.setattr(doctor_machine, "version", lambda p: None if p == "deepspeed" else real(p))
    assert named(list(doctor_machine.packages(DEEPSPEED)), "versions", "deepspeed").status == "wrong"
    assert named(list(doctor_machine.packages(NATIVE)), "versions", "deepspeed").status == "ok"


@pytest.mark.parametrize(("version", "status"), [("2.4.1", "wrong"), ("2.11.0+cu130", "ok"), (None, "wrong")])
def test_old_torch_is_wrong(monkeypatch: pytest.MonkeyPatch, version: str | None, status: str) -> None:
    real = doctor_machine.version
    monkeypatch.setattr(doctor_machine, "version", lambda p: version if p == "torch" else real(p))
    found = named(list(doctor_machine.packages(NATIVE)), "versions", "torch")
    assert found.status == status and bool(found.remedy) == (status == "wrong")


def test_rendering_marks_and_counts() -> None:
    text = render([CheckResult("a", "x", "1"), CheckResult("b", "long", "2", "wrong", "fix it"),
                          CheckResult("b", "y", "3", "note", "tune it")])
    assert text.splitlines() == ["a", "  x     1", "", "b", "! long  2", "        → fix it", "~ y     3",
                                 "        → tune it", "", "1 wrong (!); 1 could be better (~)"]


GPU = DeviceInfo("cuda", torch.device("cuda", 0), "nccl", "none visible", 0, "test")
CPU = DeviceInfo("cpu", torch.device("cpu"), "gloo", "cpu", 1, "test")


def test_strict_calls_what_is_slow_wrong_and_leaves_the_rest() -> None:
    kinds = ["ok", "note", "slow", "wrong"]
    findings = [CheckResult("a", kind, "", kind) for kind in kinds]
    assert [f.status for f in strictly(findings)] == ["ok", "note", "wrong", "wrong"]
    assert render(findings).splitlines()[-1] == "1 wrong (!); 2 could be better (~)"
    assert render(strictly(findings)).splitlines()[-1] == "2 wrong (!); 1 could be better (~)"


@pytest.mark.parametrize(
    ("config", "device", "op"),
    [
        (DEEPSPEED, CPU, "cpu_adam"),
        (DEEPSPEED, GPU, "fused_adam"),
        (NATIVE, GPU, ""),
        (replace(DEEPSPEED, precision=PrecisionConfig(dtype="fp64")), CPU, ""),
        (replace(DEEPSPEED, backend=BackendConfig(optimizer="torch")), CPU, ""),
        (replace(DEEPSPEED, backend=BackendConfig(optimizer="deepspeed")), CPU, "cpu_adam"),
    ],
)
def test_the_op_that_a_run_asks_for(config: RunConfig, device: DeviceInfo, op: str) -> None:
    assert doctor_backend.needed_op(config, device) == op


def test_ops_of_another_torch_are_named() -> None:
    built = {"version": "2.13", "cuda_version": "13.0", "hip_version": "0.0"}
    assert doctor_backend.version_problem(built, "2.13.0+cu130", "13.0", None) == ""
    assert doctor_backend.version_problem(built, "2.13.0+cpu", None, None) == ""
    assert "built with torch 2.13, and 2.12" in doctor_backend.version_problem(built, "2.12.1", "13.0", None)
    assert "built with CUDA 13.0, and 12.6" in doctor_backend.version_problem(built, "2.13.0", "12.6", None)
    assert "built with HIP 0.0, and 7.1" in doctor_backend.version_problem(built, "2.13.0", None, "7.1.25")


def test_an_installed_extension_that_does_not_load_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    class StandIn:
        """ROCm apex's: it is there, and builds when it is used."""

        def __getattr__(self, name: str) -> object:
            import torch.utils.cpp_extension as cpp

            return cpp.load("amp_C", ["amp_C.cpp"])

    installed = {"flash-attn": "2.8.3", "apex": "0.1"}
    there: dict[str, Any] = {
        "flash_attn_2_cuda": SimpleNamespace(fwd=1), "amp_C": SimpleNamespace(multi_tensor_scale=1),
    }
    monkeypatch.setattr(doctor_machine, "version", installed.get)
    monkeypatch.setattr(
        doctor_backend, "optional_import", lambda n: (there.get(n), "" if n in there else f"{n}: no symbol")
    )
    found = {f.name: f for f in doctor_backend.extensions(GPU)}
    assert found["flash-attn"].status == "ok" and found["apex"].status == "slow"
    assert "fused_layer_norm_cuda: no symbol" in found["apex"].value
    assert "docker/cuda.Dockerfile" in found["apex"].remedy
    assert (Path(__file__).resolve().parents[2] / "docker" / "cuda.Dockerfile").exists()
    there.update(amp_C=StandIn(), fused_layer_norm_cuda=SimpleNamespace(forward_affine=1))
    apex = {f.name: f for f in doctor_backend.extensions(GPU)}["apex"]
    assert apex.status == "slow" and "would be compiled at run time" in apex.value
    there["amp_C"] = SimpleNamespace(multi_tensor_scale=1)
    assert {f.status for f in doctor_backend.extensions(GPU)} == {"ok"}
    installed.clear()
    assert list(doctor_backend.extensions(GPU)) == [] and list(doctor_backend.extensions(CPU)) == []


def test_a_gpu_that_is_passed_over_is_slow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "gpu").touch()
    monkeypatch.setattr(doctor_backend, "DEVICE_FILES", {str(tmp_path / "gpu"): "a", str(tmp_path / "none"): "no"})
    none = Accelerators(None, 0, lambda i: ("", 0, ""))
    statuses = {}
    for device in ("auto", "cpu"):
        _, found = doctor_backend.devices(replace(NATIVE, backend=BackendConfig(device=device)), gpus=none)
        statuses[device] = [f.status for f in found if f.name == str(tmp_path / "gpu")]
    assert statuses == {"auto": ["slow"], "cpu": []}


def test_an_image_is_checked_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--device cuda``: a torch for CUDA is required, a GPU is not; and DeepSpeed is told what it is for."""
    monkeypatch.setenv("DS_ACCELERATOR", "")
    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    config = replace(NATIVE, backend=BackendConfig(device="cuda"))
    blind = Accelerators("cuda", 0, lambda i: ("", 0, ""))
    device, found = doctor_backend.devices(config, gpus=blind)
    assert device is None and found[-1].status == "wrong" and "DS_ACCELERATOR" not in os.environ
    device, found = doctor_backend.devices(config, installed_only=True, gpus=blind)
    assert device is not None and device.kind == "cuda" and "none visible" in named(found, "devices", "chosen").value
    assert os.environ["DS_ACCELERATOR"] == "cuda" and not [f for f in found if f.status != "ok"]
    rows = {f.name: f for f in doctor_backend.providers(config, device)}
    assert rows["attention"].value.startswith("sdpa (auto; first that fits of cudnn")
    for kind in ("rocm", None):  # a torch that was built for something else is no image for CUDA
        other = Accelerators(kind, 0, lambda i: ("", 0, ""))
        assert doctor_backend.devices(config, installed_only=True, gpus=other)[0] is None


def test_the_guard_is_in_the_table() -> None:
    rows = {f.name: f for f in doctor_backend.providers(NATIVE, CPU)}
    assert rows["jit guard"].status == "ok"
    off = replace(NATIVE, backend=BackendConfig(allow_jit=True))
    assert {f.name: f for f in doctor_backend.providers(off, CPU)}["jit guard"].status == "slow"


@pytest.mark.parametrize("adds", [True, False])
def test_rounded_wgrads_are_said(monkeypatch: pytest.MonkeyPatch, adds: bool) -> None:
    gpu = replace(CPU, kind="rocm")
    monkeypatch.setattr(doctor_backend, "widening_addmm", lambda *_: adds)
    row = doctor_backend.wgrad_sums(gpu, torch.bfloat16)
    assert row.status == ("ok" if adds else "slow") and ("rounded to bfloat16" in row.value) != adds
    assert doctor_backend.wgrad_sums(gpu, torch.float32).status == "ok"


def test_strict_refuses_a_run_whose_op_is_not_prebuilt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    import megatron_port.ext.deepspeed.deepspeed_import  # noqa: F401, I001
    import deepspeed.git_version_info as built

    command = ["doctor", "--device", "cpu", "--set", "precision.dtype=\"fp32\"", "--set", "engine=deepspeed"]
    monkeypatch.setitem(built.installed_ops, "cpu_adam", False)
    assert main(command) == 0
    assert main([*command, "--strict"]) == 3
    out = capsys.readouterr().out
    assert "! cpu_adam" in out and "DS_BUILD_CPU_ADAM=1" in out
    assert main([*command, "--strict", "--set", "engine=\"native\"", "--set", "layout.zero_stage=0"]) == 0
    assert main([*command, "--strict", "--set", "backend.optimizer=\"torch\"",
                 "--set", "backend.allow_jit=true"]) == 3


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


def test_8_bit_products_have_a_line() -> None:
    asked = replace(NATIVE, precision=PrecisionConfig(fp8="rowwise"), backend=BackendConfig(scaled_mm="reference"))
    found = named(list(doctor_backend.providers(asked, CPU)), "providers", "scaled_mm")
    assert found.status == "ok" and found.value.startswith("reference (asked for; rowwise")
    assert not [f for f in doctor_backend.providers(NATIVE, CPU) if f.name == "scaled_mm"]
