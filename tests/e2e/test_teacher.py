"""Distillation as a user types it: from a teacher beside the model, on another layout, and from its stored logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import Commands

RUN = """
engine = "native"
[model]
num_layers = 2
hidden_size = 32
num_attention_heads = 4
num_query_groups = 2
ffn_hidden_size = 48
vocab_size = 300
seq_length = 16
position_embedding = "rope"
normalization = "rmsnorm"
activation = "swiglu"
add_bias = false
[layout]
vocab_padding_multiple = 8
[batch]
micro_batch_size = 2
global_batch_size = 4
[precision]
dtype = "fp64"
[training]
steps = 3
[optimizer]
lr = 1e-2
[data]
synthetic = true
tokenizer = "byte"
[checkpoint]
keep = 0
[telemetry]
replica_check_interval = 1
"""


def losses_of(folder: Path) -> dict[int, tuple[float, float, float]]:
    """(loss, cross-entropy, KL) by step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: (line["loss"], line["cross_entropy"], line["teacher_kl"]) for line in lines
            if "learning_rate" in line}


@pytest.fixture
def run(commands: Commands, tmp_path: Path) -> Any:
    """``run(*argv)`` → output of a command that ends with ``code``; files of runs are in ``tmp_path``."""
    wide = RUN.replace("hidden_size = 32", "hidden_size = 48").replace("num_layers = 2", "num_layers = 3").replace(
        '"fp64"', '"bf16"')
    (tmp_path / "large.toml").write_text(f'name = "large"\noutput_dir = "{tmp_path}"\n{wide}')
    small = f'{RUN}\n[distillation]\nteacher = "{tmp_path}/large"\nalpha = 0.25\ntemperature = 2.0\n'
    (tmp_path / "small.toml").write_text(f'name = "small"\noutput_dir = "{tmp_path}"\n{small}')

    def run(*argv: str, code: int = 0) -> str:
        found, output = commands.run(*argv)
        assert found == code, output
        return output

    return run


def test_from_a_teacher_beside_it_and_from_its_stored_logits(run: Any, tmp_path: Path) -> None:
    """The teacher is a run on four ranks in bf16; the student's losses do not depend on where its teacher runs."""
    small, kept = str(tmp_path / "small.toml"), tmp_path / "logits"
    output = run("train", small, "--dry-run", code=5)
    assert "distillation.teacher" in output and "neither a Hugging Face folder" in output
    run("train", str(tmp_path / "large.toml"), "--nproc", "4", "--set", "layout.tensor_parallel_size=2",
        "--set", "layout.pipeline_parallel_size=2", "--set", "batch.micro_batch_size=4")
    assert "vocabulary has 300 tokens and the model's 299" in run(
        "train", small, "--dry-run", "--set", "model.vocab_size=299", code=2)
    run("train", small, "--dry-run", "--set", "layout.tensor_parallel_size=2", "--set", "layout.zero_stage=3")
    run("train", small, "--nproc", "1")
    alone = losses_of(tmp_path / "small")
    assert all(loss == pytest.approx(0.25 * ce + 0.75 * 4 * kl, rel=1e-5) for loss, ce, kl in alone.values())

    # Weights alone are read where nobody learns, wherever the teacher is by now.
    (tmp_path / "large").rename(tmp_path / "away")
    run("generate", str(tmp_path / "small"), "--prompt", "a", "--tokens", "2")
    text = ("--text", small, "--max-tokens", "40")
    assert "perplexity" in run("evaluate", str(tmp_path / "small"), *text, "--set", "data.tokenizer=byte")
    (tmp_path / "away").rename(tmp_path / "large")

    # Interrupted after a step, and resumed on four ranks.
    run("train", small, "--nproc", "1", "--set", "name=moved", "--set", "training.steps=1", "--set",
        "optimizer.decay_steps=3")
    run("train", small, "--nproc", "4", "--set", "name=moved", "--set", "layout.tensor_parallel_size=2", "--set",
        "layout.pipeline_parallel_size=2", "--set", "batch.micro_batch_size=1")
    moved = losses_of(tmp_path / "moved")
    assert [moved[s][0] for s in (1, 2, 3)] == pytest.approx([alone[s][0] for s in (1, 2, 3)], rel=1e-10)
    output = run("train", small, "--set", "name=moved", "--set", "training.steps=4", "--set",
                 f"distillation.teacher={tmp_path}/small", code=5)
    assert "was trained with the teacher" in output

    # All 300 tokens kept: the whole distribution, so the same losses.
    folder = f"distillation.logits={kept}"
    run("distill", "logits", small, "--set", folder, "--top", "300", "--block", "8", "--nproc", "4",
        "--set", "layout.tensor_parallel_size=2", "--set", "layout.context_parallel_size=2")
    whole = {path.name: path.read_bytes() for path in kept.iterdir()}
    assert set(whole) == {"header.json", "block-00000000.bin", "block-00000001.bin"}
    run("train", small, "--nproc", "2", "--set", "name=stored", "--set", folder, "--set",
        "layout.context_parallel_size=2", "--set", "layout.cp_method=ring")
    stored = losses_of(tmp_path / "stored")
    assert [stored[s][0] for s in (1, 2, 3)] == pytest.approx([alone[s][0] for s in (1, 2, 3)], rel=1e-10)

    # What is lost is written again, to the same bytes but for rounding; the rest is left alone.
    (kept / "block-00000000.bin").unlink()
    assert "block-00000000.bin is missing" in run("train", small, "--set", "name=no", "--set", folder, code=4)
    run("distill", "logits", small, "--set", folder, "--top", "300", "--block", "8")
    assert (kept / "block-00000001.bin").read_bytes() == whole["block-00000001.bin"]
    run("distill", "verify", str(kept))
    assert "top is 300 there and 8 here" in run(
        "distill", "logits", small, "--set", folder, "--top", "8", "--block", "8", code=4)
    output = run("train", small, "--set", "name=no", "--set", folder, "--set", "seed=5", code=4)
    assert "the teacher read other tokens in sample" in output
    assert "temperature 2.0 and the run's is 1.0" in run(
        "train", small, "--set", "name=no", "--set", folder, "--set", "distillation.temperature=1.0", code=4)
    damaged = bytearray((kept / "block-00000001.bin").read_bytes())
    damaged[-40] ^= 1
    (kept / "block-00000001.bin").write_bytes(damaged)
    assert "the record of sample 11 is damaged" in run("train", small, "--set", "name=no", "--set", folder, code=4)
    assert "1 of 2 blocks are missing or damaged, the first is 1" in run("distill", "verify", str(kept), code=4)
