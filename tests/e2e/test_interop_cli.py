"""``checkpoint export`` and ``import`` as a user types them, and training that starts from the result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_port.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300
RUN_FILE = """
name = "run"
engine = "native"
[model]
num_layers = 2
hidden_size = 32
num_attention_heads = 4
vocab_size = 300
seq_length = 32
[layout]
zero_stage = 0
[batch]
global_batch_size = 2
[precision]
dtype = "bf16"
[optimizer]
lr = 1e-2
decay_steps = 10
[data]
synthetic = true
tokenizer = "byte"
"""


def command(folder: Path, *arguments: str, code: int = 0) -> str:
    """Run ``megatron-port`` in ``folder``; its output."""
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "TORCHELASTIC_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(launchers)}
    done = subprocess.run(
        [sys.executable, "-m", "megatron_port", *arguments], cwd=folder, capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
        env={**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def losses(folder: Path, name: str) -> dict[int, float]:
    """Step → loss of a run."""
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {r["step"]: r["loss"] for r in records if "loss" in r}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of 5 steps that has checkpoints of steps 3 and 5."""
    folder = tmp_path_factory.mktemp("interop")
    (folder / "run.toml").write_text(RUN_FILE)
    command(folder, "train", "run.toml", "--set", "training.steps=5", "--set", "checkpoint.save_interval=3")
    return folder


@pytest.mark.parametrize("form", ["dcp", pytest.param("universal", marks=pytest.mark.slow)])
def test_out_and_in_and_on(trained: Path, form: str) -> None:
    """Step 3 goes out, comes back, and gives the losses of steps 4 and 5 that the run itself had."""
    step = "runs/run/checkpoints/step-00000003"
    assert form in command(trained, "checkpoint", "export", step, "--to", form, f"out/{form}").replace(
        "load_universal", "universal"
    )
    said = command(trained, "checkpoint", "import", f"out/{form}", f"in/{form}")
    place = f"in/{form}/step-00000003"
    assert f"checkpoint.resume={place}" in said
    assert "0 of" in command(trained, "checkpoint", "diff", step, place, "--kind", "all")
    command(trained, "train", "run.toml", "--set", f"name={form}", "--set", "training.steps=5", "--set",
            f"checkpoint.resume={place}")
    first, again = losses(trained, "run"), losses(trained, form)
    assert set(again) == {4, 5} and all(again[s] == first[s] for s in again)


@pytest.mark.slow
def test_weights_alone_start_a_run(trained: Path) -> None:
    """Weights of step 5 are a new run's first: its first loss is that of trained weights, its counters are at 0."""
    command(trained, "checkpoint", "export", "runs/run/checkpoints/step-00000005", "--to", "dcp", "out/weights")
    command(trained, "checkpoint", "import", "out/weights", "in/weights", "--weights-only")
    command(trained, "train", "run.toml", "--set", "name=tuned", "--set", "training.steps=1", "--set",
            "checkpoint.resume=in/weights/step-00000000")
    assert losses(trained, "tuned")[1] < losses(trained, "run")[1]


def test_errors_are_one_message(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(trained)
    (trained / "mds").mkdir(exist_ok=True)
    (trained / "mds" / "mp_rank_00_model_states.pt").write_bytes(b"x")
    for arguments, text in (
        (("export", "runs", "--to", "dcp", "x"), "not a checkpoint"),
        (("export", "runs/run/checkpoints/step-00000003", "--to", "dcp", "runs"), "exists"),
        (("import", "runs", "x"), "not a checkpoint that can be imported"),
        (("import", "nowhere", "x"), "is not a directory"),
        (("import", "mds", "x"), "--trust-pickle"),
        (("import", "mds", "x", "--trust-pickle"), "cannot be read"),
    ):
        assert main(["checkpoint", *arguments]) == 5
        captured = capsys.readouterr()
        said = captured.out + captured.err
        assert text in said and "Traceback" not in said and said.count("error:") == 1
