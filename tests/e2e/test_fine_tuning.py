"""Fine-tuning with adapters as a user types it: trained, resumed on another layout, evaluated, exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import Commands

from megatron_port.core.checkpoint.reader import open_checkpoint

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
tie_embeddings = false
[batch]
micro_batch_size = 2
global_batch_size = 4
[precision]
dtype = "fp64"
[optimizer]
lr = 1e-2
[data]
synthetic = true
tokenizer = "byte"
[checkpoint]
keep = 0
"""
TUNED = "[fine_tuning]\nmethod = \"dora\"\nrank = 3\n"
TRAINABLE = 2 * (3 * (6 * 32 + 48) + 4 * (32 + 16 + 16 + 32 + 48 + 48 + 32))
"""A, B and lengths of the seven matrices of each layer: rank 3 times inputs, and 4 times outputs."""


def steps_of(folder: Path) -> dict[int, float]:
    """Loss by step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "learning_rate" in line}


@pytest.fixture
def run(commands: Commands, tmp_path: Path) -> Any:
    """``run(*argv)`` → output of a command that succeeds; files of runs are in ``tmp_path``."""
    (tmp_path / "base.toml").write_text(f'name = "base"\noutput_dir = "{tmp_path}"\n{RUN}')
    tuned = RUN.replace("[checkpoint]", f'[checkpoint]\ninitial_weights = "{tmp_path}/base"')
    (tmp_path / "tuned.toml").write_text(f'name = "tuned"\noutput_dir = "{tmp_path}"\n{tuned}{TUNED}')

    def run(*argv: str, code: int = 0) -> str:
        found, output = commands.run(*argv)
        assert found == code, output
        return output

    return run


def test_adapters_are_resumed_on_another_layout_and_exported(run: Any, tmp_path: Path) -> None:
    base, tuned = str(tmp_path / "base.toml"), str(tmp_path / "tuned.toml")
    run("train", base, "--nproc", "1", "--set", "training.steps=2")
    steps = ("--set", "training.steps=4", "--set", "optimizer.decay_steps=4")
    once = run("train", tuned, "--nproc", "1", *steps, "--set", "name=once")
    assert f"{TRAINABLE:,} trained" in once
    run("train", tuned, "--nproc", "1", *steps, "--set", "training.steps=2")
    run("train", tuned, "--nproc", "2", *steps, "--set", "layout.tensor_parallel_size=2",
        "--set", "layout.vocab_padding_multiple=2")
    expected, found = steps_of(tmp_path / "once"), steps_of(tmp_path / "tuned")
    assert found.keys() == expected.keys() and all(abs(found[i] - expected[i]) <= 1e-9 for i in expected)

    last = tmp_path / "tuned" / "checkpoints" / "step-00000004"
    checkpoint = open_checkpoint(last)
    assert sum(piece.numel for piece in checkpoint.manifest.pieces) == 3 * TRAINABLE
    text = ("--text", base, "--max-tokens", "64", "--set", "data.tokenizer=byte")
    assert run("evaluate", str(last), *text) != run("evaluate", str(tmp_path / "base"), *text)

    run("checkpoint", "export", str(last), str(tmp_path / "peft"), "--to", "peft")
    # It begins where the run ended, and so does one from the merged weights: its first loss is that of the fifth step.
    again = ("--set", "training.steps=1", "--set", "optimizer.decay_steps=4", "--set", "checkpoint.save_final=false")
    run("train", tuned, "--nproc", "1", *again, "--set", "name=again", "--set",
        f"fine_tuning.adapters={tmp_path / 'peft'}")
    run("train", base, "--nproc", "1", *again, "--set", "name=merged", "--set", f"checkpoint.initial_weights={last}")
    assert abs(steps_of(tmp_path / "again")[1] - steps_of(tmp_path / "merged")[1]) <= 1e-6

    run("train", base, "--nproc", "1", "--set", "training.steps=3")
    refused = run("train", tuned, "--nproc", "1", "--set", "training.steps=5", code=5)
    assert "adapters of other weights" in refused
    assert "rank is 3 there and 4 here" in run(
        "train", tuned, "--nproc", "1", "--set", "training.steps=5", "--set", "fine_tuning.rank=4", code=5
    )
