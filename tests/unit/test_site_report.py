"""What leaves a site in its report, and the arithmetic of the profile."""

from __future__ import annotations

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
