"""`tune` on this machine: real trials on two ranks, a failed one kept, gone on with, a winner that trains."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN = """
extends = "clusters/cpu"
name = "tiny"
engine = "native"
[model]
num_layers = 2
hidden_size = 32
num_attention_heads = 2
vocab_size = 300
seq_length = 32
[layout]
zero_stage = 0
vocab_padding_multiple = 8
[batch]
global_batch_size = 4
[precision]
dtype = "fp32"
[data]
synthetic = true
tokenizer = "byte"
[cluster]
memory_gb = 4.0
peak_tflops = 0.2
[hardware]
device = "a core"
matmul_tflops = 0.1
compute_units = 1
tile_rows = 64
tile_columns = 64
launch_us = 10.0
memory_bandwidth_gb = 8.0
node_gb = 1.0
reserved_gb = 0.3
"""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def command(*arguments: str, code: int = 0) -> str:
    """Output of ``megatron-port``."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "RANK", "WORLD_", "MASTER_", "LOCAL_"))}
    done = subprocess.run(
        [sys.executable, "-m", "megatron_port", *arguments], cwd=ROOT, text=True, capture_output=True, timeout=400,
        env={**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(RUN)
    return path


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()][1:]


def test_trials_winner_and_resume(run_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "tuned"
    base = ("tune", str(run_file), "--nproc", "2", "--steps", "3", "--warm-up", "1", "--out", str(out))
    text = command(*base, "--trials", "2")
    assert "measured, best first" in text and f"megatron-port train {out}/winner.toml --nproc 2" in text
    assert [r["status"] for r in rows(out)] == ["ok", "ok"]
    for r in rows(out):
        assert r["seconds"] > 0 and r["memory_bytes"] > 50e6 and r["tokens_per_second"] == 4 * 32 / r["seconds"]
    text = command(*base, "--trials", "3", "--timeout", "0.2")  # the third has no time: data, not an error
    assert "2 trials of an earlier start" in text and "timeout: 2 devices" in text
    assert [r["status"] for r in rows(out)] == ["ok", "ok", "timeout"]
    command("train", str(out / "winner.toml"), "--nproc", "2", "--set", "training.steps=1", "--set",
            f"output_dir={tmp_path / 'runs'}", "--set", "checkpoint.save_final=false")
    assert (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().count('"loss"') == 1


def test_where_nothing_works_the_exit_code_says_so(run_file: Path, tmp_path: Path) -> None:
    text = command("tune", str(run_file), "--nproc", "2", "--trials", "1", "--steps", "3", "--out", str(tmp_path / "t"),
                   "--set", "data.synthetic=false", "--set", 'data.train=["/nowhere/corpus"]', code=2)
    assert "failed: 2 devices" in text and "/nowhere/corpus" in text and "none of 1 trials worked" in text


@pytest.mark.skipif(importlib.util.find_spec("deephyper") is None, reason="DeepHyper is not installed (extra: tune)")
def test_deephyper_itself(run_file: Path, tmp_path: Path) -> None:
    text = command("tune", str(run_file), "--nproc", "2", "--trials", "3", "--steps", "3", "--warm-up", "1",
                   "--strategy", "deephyper", "--out", str(tmp_path / "t"))
    assert "winner:" in text and [r["status"] for r in rows(tmp_path / "t")] == ["ok"] * 3


def test_calibrate_then_sweep(run_file: Path, tmp_path: Path) -> None:
    machine = tmp_path / "machine.toml"
    text = command("bench", "calibrate", "clusters/cpu", "-o", str(machine), "--nproc", "2", "--seconds", "0.02")
    assert "collectives of 2 ranks" in text and "all-gather" in text
    run = tmp_path / "measured.toml"
    kept = RUN.replace('extends = "clusters/cpu"', f'extends = "{machine}"').partition("[cluster]")[0]
    run.write_text(kept)
    out = tmp_path / "sweep"
    base = ("bench", "sweep", str(run), "--nproc", "2", "--steps", "3", "--warm-up", "1", "--out", str(out))
    text = command(*base, "--study", "tensor")
    assert text.count("s per step") == 2 and "planned" in text
    page = (out / "sweep.html").read_text()
    assert "measured" in page and "tensor parallelism" in page and "http:" not in page and "https:" not in page
    before = (out / "results.jsonl").read_text()
    assert command(*base, "--study", "tensor").count("s per step") == 2  # nothing is measured twice
    assert (out / "results.jsonl").read_text() == before
