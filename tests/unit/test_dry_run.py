"""`train --dry-run` at the sizes that nobody can start by hand."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_port.cli.main import main

ROOT = Path(__file__).resolve().parents[2]


def dry_run(*arguments: str) -> tuple[str, float, int]:
    """Output, seconds and peak memory (bytes) of a dry run in a process of its own."""
    measured = (
        "import sys\n"
        "from megatron_port.cli.main import main\n"
        "from megatron_port.ext.telemetry.peak_memory import peak_resident_bytes\n"
        "code = main(['train', *sys.argv[1:]])\n"
        "print(peak_resident_bytes())\n"  # without what the worker that starts it has
        "sys.exit(code)"
    )
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", measured, *arguments], cwd=ROOT, text=True, capture_output=True,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": "/root"}, timeout=120,
    )
    assert done.returncode == 0, done.stderr
    text, _, peak = done.stdout.rstrip().rpartition("\n")
    return text, time.monotonic() - started, int(peak)


def test_every_rank_of_the_1t_run() -> None:
    nodes, replicas = 3072, 48
    text, seconds, peak = dry_run(
        "runs/frontier-1t", "--set", f"cluster.nodes={nodes}", "--set", f"batch.global_batch_size={1600 * replicas}",
        "--set", "layout.data_parallel_size=0", "--dry-run", "all",
    )
    world = 8 * nodes
    assert f"dp {replicas} = {world} ranks" in text
    assert f"{world // 8} groups of 8 " in text and f"{world // replicas} groups of {replicas} " in text
    assert "ranks 0-7 on 1 node" in text and "on 64 nodes" in text
    stages = [line.split() for line in text.splitlines() if line.rstrip().endswith("GB")]
    assert [int(row[0]) for row in stages] == list(range(64))
    assert stages[-1][1] == f"{world - world // 64}-{world - 1}"
    assert sum(int(row[2]) for row in stages) == 128
    assert seconds < 60 and peak < 2e9


def test_every_rank_of_the_405b_run_with_long_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    """16,384 ranks, 16 nodes of which share each sequence, within a minute of one core."""
    started = time.process_time()
    assert main(["train", "runs/llama-405b-128k", "--dry-run"]) == 0
    text, seconds = capsys.readouterr().out, time.process_time() - started
    assert "tp 8 x pp 16 x cp 16 x dp 8 = 16384 ranks" in text and "405,853,388,800 parameters" in text
    assert "1024 groups of 16   (share the positions of a sequence); the first: ranks 0-120 by 8 on 16 nodes" in text
    assert "pipeline bubble 23.4% of the useful time" in text  # 15 / (16 micro-batches x 4 chunks)
    stages = [line.split() for line in text.splitlines() if line.rstrip().endswith("GB") and line[4:5].isdigit()]
    assert stages[-1][1] == "15360-16383"
    assert seconds < 60


def test_what_does_not_fit_is_refused_with_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """Of 22B; for 1T the layout that fits is looked for in 9 s (test_plan_cli.py times that search)."""
    refused = main(["train", "runs/frontier-22b", "--dry-run", "--set", "layout.tensor_parallel_size=1", "--set",
                    "layout.pipeline_parallel_size=1", "--set", "layout.data_parallel_size=0"])
    text = capsys.readouterr().err
    assert refused == 2 and "stage 0 needs 163.4 GB" in text and "a device of frontier has 64 GB" in text
    assert "99.4 GB too much" in text and "--set layout.zero_stage=3" in text


def test_tensor_ranks_beyond_the_key_value_heads(capsys: pytest.CaptureFixture[str]) -> None:
    """Two heads on eight ranks: every rank is built, and the slices cover each parameter once."""
    assert main(["train", "runs/quickstart", "--set", "model.num_attention_heads=8", "--set",
                 "model.num_query_groups=2", "--set", "layout.tensor_parallel_size=8", "--set",
                 "layout.data_parallel_size=2", "--set", "data.synthetic=true", "--set", "cluster.nodes=0",
                 "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "tp 8 x pp 2 x dp 2 = 32 ranks" in text
    assert "8 groups of 4    (hold the same key/value heads); the first: ranks 0-3" in text


def test_initial_weights_that_cannot_be_read_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the field of config.json, before anything is built; so are weights that are not there."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "falcon", "alibi": True}))
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    asked = ["train", "runs/quickstart", "--set", "data.synthetic=true", "--set", "cluster.nodes=0", "--set",
             f"checkpoint.initial_weights={tmp_path}", "--dry-run"]
    assert main(asked) == 5 and "alibi is True" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 32, "n_head": 2}))
    assert main(asked) == 5 and "wpe.weight (1024, 32) is not in its files" in capsys.readouterr().err
