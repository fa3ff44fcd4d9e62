"""What leaves a site in its report, and the arithmetic of the profile."""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path

import pytest

from benchmarks.compare.limits import group_of, limits
from benchmarks.compare.profile import Kernel, gaps_of, slowest_third
from benchmarks.compare.sizes import sizes
from scripts import site_report


def test_names_addresses_and_secrets_are_removed() -> None:
    text = 'HF_TOKEN=hf_abc "WANDB_API_KEY": "123" /home/somebody/x 10.1.2.3 127.0.0.1 host7 xhost7 somebody'
    made = site_report.redact(text, [("/home/somebody", "HOME"), ("somebody", "USER"), ("host7", "HOST")])
    assert made == 'HF_TOKEN=REMOVED "WANDB_API_KEY": REMOVED HOME/x ADDRESS 127.0.0.1 HOST xhost7 USER'
    kept = "12:34:56 2026-11-21T21:35:21 0.0.0.0:29500 a::b torch 2.13.0 1:2:3"
    assert site_report.redact(f"me@site.org 3c:ec:ef:12:34:56 fe80::1 2001:db8::8a2e:370:7334 {kept}", []) == (
        f"ADDRESS ADDRESS ADDRESS ADDRESS {kept}")


def test_short_names_are_removed_and_ordinary_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_report.socket, "gethostname", lambda: "n7.site.org")
    monkeypatch.setattr(site_report.socket, "getfqdn", lambda: "n7.site.org")
    monkeypatch.setattr(site_report.getpass, "getuser", lambda: "ann")
    monkeypatch.setenv("SCRATCH", "/lustre/proj/abc123/ann")
    made = site_report.redact("ann at n7: /lustre/proj/abc123/ann/x, annual", site_report.replacements())
    assert made == "USER at HOST: SCRATCH/x, annual"
    monkeypatch.setattr(site_report.getpass, "getuser", lambda: "root")
    assert "root" not in dict(site_report.replacements())


def test_the_archive_holds_redacted_text_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "made"
    (folder / "inside").mkdir(parents=True)
    (folder / "a.txt").write_text("from secretive")
    (folder / "inside" / "node-secretive.json").write_text("{}")
    (folder / "weights.bin").write_bytes(b"\xff\xfe\x00")
    monkeypatch.setattr(site_report, "replacements", lambda: [("secretive", "HOST")])
    archive = tmp_path / "made.tar.gz"
    site_report.pack(folder, archive)
    with tarfile.open(archive) as tar:
        names = tar.getnames()
        inside = tar.extractfile("site-report/a.txt")
        assert inside is not None and inside.read() == b"from HOST"
        assert all(entry.uname == "" and entry.uid == 0 for entry in tar.getmembers())
    assert "site-report/inside/node-HOST.json" in names and not any("weights" in n for n in names)


def test_a_part_that_fails_or_hangs_is_noted(tmp_path: Path) -> None:
    failing = [sys.executable, "-c", "print('so'); raise SystemExit(7)"]
    bad = site_report.run(site_report.Part("bad", failing, 60), tmp_path)
    assert bad.exit == 7 and (tmp_path / "bad.txt").read_text() == "so\n"
    slow = site_report.run(site_report.Part("slow", ["sleep", "60"], 0.1), tmp_path)
    assert slow.exit == 124 and slow.seconds < 30
    assert slow.state == "stopped: not done after 0.1 s, its limit" and bad.state == "failed (exit 7)"
    assert "stopped: not done after 0.1 s" in (tmp_path / "slow.txt").read_text()


def test_the_overview_names_states_and_puts_predictions_beside_measurements(tmp_path: Path) -> None:
    done = [site_report.Outcome("doctor", "x", 0, 3.0, 60.0, "versions"),
            site_report.Outcome("compare", "y", 124, 60.0, 60.0, "steps")]
    text = site_report.overview(tmp_path, "", 0, done)
    assert "| doctor | ok | 3 | doctor.txt | versions |" in text and "stopped: not done after 60 s" in text
    assert "did not end well" in text
    row = {"size": "tiny", "peer": "ours", "predicted_seconds": 0.011, "measured_seconds": 0.01, "time_error": 0.1,
           "predicted_bytes": 2e6, "measured_bytes": 3e6}
    (tmp_path / "predicted.json").write_text(json.dumps({"rows": [row]}))
    size = {"size": "tiny", "about": "for tests", "dtype": "fp32", "tokens_per_step": 128, "peers": [
        {"peer": "ours", "state": "counted", "seconds": {"median": 0.01, "q1": 0.009, "q3": 0.012},
         "cpu_seconds": {"median": 0.008}, "tokens_per_second": 12800.0, "peak_memory_bytes": 3e6},
        {"peer": "torchtitan", "state": "unable", "reason": "not installed"}]}
    (tmp_path / "compare.json").write_text(json.dumps({"sizes": [size]}))
    text = site_report.overview(tmp_path, "", 0, done)
    assert "| tiny | ours | 11 | 10 | +10% | 2 | 3 |" in text
    assert "| ours | counted | 10 (9 to 12) | 8 | 12800 | - | 3 |" in text and "unable: not installed" in text


def test_short_has_shorter_limits(tmp_path: Path) -> None:
    whole, short = (site_report.parts(tmp_path, 0, "", short=s, cluster="") for s in (False, True))
    assert [p.name for p in whole] == [p.name for p in short] and all(p.says for p in whole)
    assert all(a.limit_s > b.limit_s for a, b in zip(whole, short)) and sum(p.limit_s for p in short) <= 3600


def test_launch_gaps_count_overlapping_kernels_once() -> None:
    found = gaps_of([(0.0, 4.0), (6.0, 8.0), (1.0, 3.0), (3.0, 5.0)], {})
    assert found.launch_gaps == pytest.approx(1 / 8)
    assert gaps_of([], {}).launch_gaps == 0.0


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
