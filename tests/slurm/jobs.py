"""Small real runs for the tests of tests/slurm: their settings, their logs, and what to compare them with."""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
from pathlib import Path

from commands import Commands

ROOT = Path(__file__).resolve().parents[2]

TINY = {
    "backend.device": "cpu", "engine": "native", "precision.dtype": "fp32", "optimizer.eps": "1e-5",
    "model.name": "tiny", "model.num_layers": "4", "model.hidden_size": "32", "model.num_attention_heads": "4",
    "model.head_dim": "0", "model.vocab_size": "257", "model.seq_length": "16", "model.ffn_hidden_size": "0",
    "layout.tensor_parallel_size": "1", "layout.pipeline_parallel_size": "1", "layout.data_parallel_size": "0",
    "layout.zero_stage": "0", "activations.policy": "none", "batch.micro_batch_size": "1",
    "batch.global_batch_size": "12",
    "data.synthetic": "true", "training.steps": "4", "training.eval_interval": "0", "training.eval_batches": "0",
    "optimizer.warmup_steps": "0", "checkpoint.save_interval": "0", "checkpoint.keep": "0", "cluster.peak_tflops": "0",
}
"""Seconds of two cores, for any layout of up to 12 ranks."""


def settings(**changes: object) -> list[str]:
    """``--set`` arguments of the tiny run; ``layout__tensor_parallel_size=2`` changes one."""
    merged = TINY | {name.replace("__", "."): str(value) for name, value in changes.items()}
    return [word for name, value in merged.items() for word in ("--set", f"{name}={value}")]


def environment(**more: str) -> dict[str, str]:
    """What a user's shell exports to sbatch: this interpreter, and one thread per rank."""
    return {
        "PATH": os.environ["PATH"], "HOME": "/root", "USER": "root", "LANG": "C.UTF-8", "PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1", **more,
    }


def metrics(run_folder: Path) -> list[dict]:
    """Training steps of metrics.jsonl."""
    path = run_folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    whole = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [record for record in map(json.loads, whole) if "loss" in record]


def steps(run_folder: Path) -> int:
    """Steps done."""
    found = metrics(run_folder)
    return found[-1]["step"] if found else 0


def losses(run_folder: Path) -> list[float]:
    """Loss of every step, which must be there once each and in order."""
    found = metrics(run_folder)
    assert [r["step"] for r in found] == list(range(1, len(found) + 1)), [r["step"] for r in found]
    return [r["loss"] for r in found]


@functools.cache
def train_here(nproc: int, *arguments: str) -> list[float]:
    """The same run without SLURM and without a stop, on this host; its losses."""
    with tempfile.TemporaryDirectory() as folder, Commands(Path(folder) / "logs") as commands:
        code, output = commands.run("train", "runs/quickstart", *arguments, "--set", "name=here", "--set",
                                    f"output_dir={folder}", "--nproc", str(nproc), seconds=300)
        assert code == 0, output
        return losses(Path(folder) / "here")
