"""What leaves a site in its report, and the arithmetic of the profile."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import part_runner
import psutil
import pytest
import site_report
from site_report import overview, site_redact  # type: ignore[attr-defined]

from benchmarks.compare.limits import group_of, limits
from benchmarks.compare.profile import Kernel, gaps_of, slowest_third
from benchmarks.compare.sizes import sizes


def test_names_addresses_and_secrets_are_removed() -> None:
    text = 'HF_TOKEN=hf_abc "WANDB_API_KEY": "123" /home/somebody/x 10.1.2.3 127.0.0.1 host7 xhost7 somebody'
    made = site_redact.redact(text, [("/home/somebody", "HOME"), ("somebody", "USER"), ("host7", "HOST")])
    assert made == 'HF_TOKEN=*** "WANDB_API_KEY": "***" HOME/x ADDRESS 127.0.0.1 HOST xhost7 USER'
    kept = "12:34:56 2026-11-21T21:35:21 0.0.0.0:29500 a::b torch 2.13.0 1:2:3"
    assert site_redact.redact(f"me@site.org 3c:ec:ef:12:34:56 fe80::1 2001:db8::8a2e:370:7334 {kept}", []) == (
        f"ADDRESS ADDRESS ADDRESS ADDRESS {kept}")


def test_short_names_are_removed_and_ordinary_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_redact.socket, "gethostname", lambda: "n7.site.org")  # type: ignore[attr-defined]
    monkeypatch.setattr(site_redact.socket, "getfqdn", lambda: "n7.site.org")  # type: ignore[attr-defined]
    monkeypatch.setattr(site_redact.getpass, "getuser", lambda: "ann")  # type: ignore[attr-defined]
    monkeypatch.setenv("SCRATCH", "/lustre/proj/abc123/ann")
    made = site_redact.redact("ann at n7: /lustre/proj/abc123/ann/x, annual", site_redact.replacements())
    assert made == "USER at HOST: SCRATCH/x, annual"
    monkeypatch.setattr(site_redact.getpass, "getuser", lambda: "root")  # type: ignore[attr-defined]
    assert "root" not in dict(site_redact.replacements())


def test_json_stays_json_and_counts_of_tokens_are_no_secrets(tmp_path: Path) -> None:
    path = tmp_path / "compare.json"
    path.write_text(json.dumps({"tokens_per_step": 128, "token": "abc", "at n7": ["x@site.org", 0.5, None]}, indent=1))
    site_redact.redact_file(path, [("n7", "HOST")])
    assert json.loads(path.read_text()) == {"tokens_per_step": 128, "token": "***", "at HOST": ["ADDRESS", 0.5, None]}


def test_every_node_of_the_job_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_redact.socket, "gethostname", lambda: "n8.site.org")  # type: ignore[attr-defined]
    monkeypatch.setattr(site_redact.socket, "getfqdn", lambda: "n8.site.org")  # type: ignore[attr-defined]
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[07-08],n8,gpu-rack3")
    made = site_redact.redact("n07 n08 n8.site.org n8 gpu-rack3 n09", site_redact.replacements())
    assert made == "HOST-2 HOST-3 HOST HOST HOST-4 n09"


def test_the_archive_holds_redacted_text_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "made"
    (folder / "inside").mkdir(parents=True)
    (folder / "a.txt").write_text(f"from secretive, in {folder}/inside")
    (folder / "inside" / "node-secretive.json").write_text("{}")
    (folder / "weights.bin").write_bytes(b"\xff\xfe\x00")
    monkeypatch.setattr(site_redact, "replacements", lambda: [("secretive", "HOST")])
    archive = tmp_path / "made.tar.gz"
    site_redact.pack(folder, archive, [(str(folder), "REPORT")])
    with tarfile.open(archive) as tar:
        names = tar.getnames()
        inside = tar.extractfile("site-report/a.txt")
        assert inside is not None and inside.read() == b"from HOST, in REPORT/inside"
        assert all(entry.uname == "" and entry.uid == 0 for entry in tar.getmembers())
    assert "site-report/inside/node-HOST.json" in names and not any("weights" in n for n in names)


def test_a_part_that_fails_or_hangs_is_noted(tmp_path: Path) -> None:
    failing = [sys.executable, "-c", "print('so'); raise SystemExit(7)"]
    bad = part_runner.run(part_runner.Part("bad", failing, 60), tmp_path)
    assert bad.exit == 7 and (tmp_path / "bad.txt").read_text() == "so\n"
    slow = part_runner.run(part_runner.Part("slow", ["sleep", "60"], 0.1), tmp_path)
    assert slow.exit == 124 and slow.seconds < 30
    assert slow.state == "stopped: not done after 0.1 s, its limit" and bad.state == "failed (exit 7)"
    assert "stopped: not done after 0.1 s" in (tmp_path / "slow.txt").read_text()


def test_the_overview_names_states_and_puts_predictions_beside_measurements(tmp_path: Path) -> None:
    done = [part_runner.PartResult("doctor", "x", 0, 3.0, 60.0, "versions"),
            part_runner.PartResult("compare", "y", 124, 60.0, 60.0, "steps")]
    (tmp_path / "compare.txt").write_text("the reason\n")
    text = overview(tmp_path, {"machine": "one node"}, done)
    assert "| doctor | ok | 3 | doctor.txt | versions |" in text and "stopped: not done after 60 s" in text
    assert "did not end well" in text and "the reason" in text and "- machine: one node" in text
    row = {"size": "tiny", "peer": "ours", "predicted_seconds": 0.011, "measured_seconds": 0.01, "time_error": 0.1,
           "measured_cpu_seconds": 0.008, "predicted_bytes": 2e6, "measured_bytes": 3e6}
    (tmp_path / "predicted.json").write_text(json.dumps({"rows": [row]}))
    size = {"size": "tiny", "about": "for tests", "dtype": "fp32", "tokens_per_step": 128,
            "model": {"num_layers": 2}, "peers": [
        {"peer": "ours", "state": "counted", "seconds": {"median": 0.01, "q1": 0.009, "q3": 0.012},
         "cpu_seconds": {"median": 0.008}, "tokens_per_second": 12800.0, "peak_memory_bytes": 3e6},
        {"peer": "torchtitan", "state": "unable", "reason": "not installed"}]}
    (tmp_path / "compare.json").write_text(json.dumps({"sizes": [size]}))
    text = overview(tmp_path, {}, done)
    assert "| tiny | ours | 11 | 10 (+10%) | 8 (+38%) | 2 | 3 |" in text
    assert "| ours | counted | 10 (9 to 12) | 8 | 12800 | - | - | 3 |" in text and "unable: not installed" in text


def test_short_has_shorter_limits(tmp_path: Path) -> None:
    whole, short = (site_report.parts(tmp_path, 0, "", short=s, cluster="") for s in (False, True))
    assert [p.name for p in whole] == [p.name for p in short] and all(p.says for p in whole)
    assert all(a.limit_s > b.limit_s for a, b in zip(whole, short)) and sum(p.limit_s for p in short) <= 3600


def test_where_a_job_ends_soon_every_part_leaves_time_to_those_after_it(tmp_path: Path) -> None:
    wanted = site_report.parts(tmp_path, 8, "H100", short=False, cluster="", nodes=2)
    assert "preflight-nodes" in [p.name for p in wanted]
    for minutes in (60.0, 120.0):
        left = minutes * 60
        for i, part in enumerate(wanted):  # each takes all that it may
            given = part_runner.allowance(part, wanted[i + 1 :], left, site_report.PACKING_S)
            assert part.least_s <= given <= part.limit_s, part.name
            left -= given
        assert left >= site_report.PACKING_S
    given = part_runner.allowance(wanted[0], wanted[1:], site_report.PACKING_S + 5.0, site_report.PACKING_S)
    assert given == 5.0  # what is not there is not given
    assert part_runner.run(wanted[0], tmp_path, 5.0).state == "not run: no time left"
    assert part_runner.allowance(wanted[0], [], None) == wanted[0].limit_s


def test_a_stopped_part_takes_along_what_it_started_in_other_sessions() -> None:
    inner = "import os, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(60)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    process = subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE)
    assert process.stdout is not None
    left = psutil.Process(int(process.stdout.readline()))
    part_runner.end(process)
    process.stdout.close()
    with contextlib.suppress(psutil.NoSuchProcess):
        assert left.status() == psutil.STATUS_ZOMBIE


def test_a_signal_ends_the_part_at_work_and_the_rest_is_not_begun(tmp_path: Path) -> None:
    tell = f"import os, signal, time; os.kill({os.getpid()}, signal.SIGTERM); time.sleep(60)"
    wanted = [part_runner.Part("first", [sys.executable, "-c", tell], 50.0), part_runner.Part("second", ["true"], 50.0)]
    found = part_runner.run_all(wanted, tmp_path, None)
    assert [o.state for o in found] == ["stopped: the job was told to end", "not run: no time left"]
    assert "got SIGTERM" in (tmp_path / "first.txt").read_text() and found[0].seconds < 40


def test_the_shell_of_salloc_on_a_login_node_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    assert site_report.main(["--out", str(tmp_path / "x")]) == 3
    assert "not on one of its nodes" in capsys.readouterr().err and not (tmp_path / "x").exists()


def test_a_folder_of_somebody_else_is_not_cleared(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    assert "no folder of an earlier report" in site_report.clear(tmp_path) and (tmp_path / "thesis.tex").exists()
    assert not site_report.clear(tmp_path / "new") and not site_report.clear(tmp_path / "new")


def test_launch_gaps_count_overlapping_kernels_once() -> None:
    found = gaps_of([(0.0, 4.0), (6.0, 8.0), (1.0, 3.0), (3.0, 5.0)], {})
    assert found.profiled_gaps == pytest.approx(1 / 8) and found.busy == 7.0
    assert gaps_of([], {}).profiled_gaps == 0.0


def test_the_slowest_third_and_the_groups() -> None:
    kernels = [Kernel(str(s), "", s, 1) for s in (4.0, 3.0, 2.0, 1.0)]
    assert [k.seconds for k in slowest_third(kernels)] == [4.0]
    names = {
        "aten::_scaled_dot_product_flash_attention_for_cpu": "attention", "megatron_port::adamw_": "optimizer",
        "aten::addmm": "products", "megatron_port::norm_backward": "norm", "aten::native_layer_norm": "norm",
        "megatron_port::cross_entropy_gradient_": "loss", "megatron_port::bias_gelu_forward": "activation",
        "nvjet_hsh_128x256": "products", "Memcpy DtoD": "copies and fills", "aten::add_": "sums and other element-wise",
    }
    assert {name: group_of(name) for name in names} == names


def test_products_of_the_limits_are_the_model_flops_without_attention() -> None:
    size = sizes()["6.7b"]
    found = limits(size)
    assert found["products"].flops + 2 * found["attention"].flops == pytest.approx(size.flops)
