"""The examples, as a user runs them: from outside the package, by the command line, each proved by ``parity``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Commands

from megatron_port.tools.live.server import FollowedRun, sections

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def of_example(folder: str) -> dict[str, str]:
    """An environment in which the modules of an example are found."""
    return {"PYTHONPATH": str(EXAMPLES / folder)}


@pytest.mark.parametrize(("run", "layouts"), [
    ("optimizer/signum", ("tp1pp1dp1", "tp2pp1dp2")),
    ("loss/z_loss", ("tp1pp1dp1", "tp4pp1dp1")),
    ("objective/distinct_tokens", ("tp1pp1dp1", "tp2pp2dp2")),
    ("source/copying", ("tp1pp1dp1", "tp1pp1dp4")),
    ("kernel/lean_swiglu", ("tp1pp1dp1", "tp2pp1dp1sp")),
    ("schedule/eager", ("tp1pp1dp1", "tp1pp4dp1")),
    ("lr_schedule/one_minus_square", ("tp1pp1dp1", "tp2pp2dp2")),
    ("family/bigcode", ("tp1pp1dp1", "tp2pp2dp1sp")),
    ("mixer/gated_delta_net", ("tp1pp1dp1", "tp2pp2dp2")),
])
def test_layouts_agree(commands: Commands, run: str, layouts: tuple[str, ...]) -> None:
    path = EXAMPLES / f"{run}.toml"
    assert f"parity examples/{run}.toml --layouts {' '.join(layouts)}" in path.read_text()  # what the file says
    code, said = commands.run(
        "parity", str(path), "--layouts", *layouts, "--steps", "2", env=of_example(run.partition("/")[0]), seconds=500
    )
    assert code == 0, said
    assert said.count("EQUAL within tolerance") == len(layouts) - 1


def train(commands: Commands, run: str, folder: Path, *more: str) -> str:
    """Train an example as its run file says, into another folder; what was printed."""
    path = EXAMPLES / f"{run}.toml"
    assert f"train examples/{run}.toml" in path.read_text().splitlines()[0]
    code, said = commands.run("train", str(path), "--set", f"output_dir={folder}", *more,
                              env=of_example(run.partition("/")[0]))
    assert code == 0, said
    return said


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "example" / "metrics.jsonl").read_text().splitlines()]


def test_a_metric_from_outside_is_shown_everywhere(commands: Commands, tmp_path: Path) -> None:
    """Also by commands that do not import the plugin, and alike on four ranks."""
    said = train(commands, "metric/weight_norm", tmp_path, "--set", "training.steps=4")
    lines = records(tmp_path)
    norms = [line["weight_norm"] for line in lines]
    assert len(norms) == 4 and norms[0] != norms[-1] and list(lines[0])[-1] == "weight_norm"
    assert all(f"| weight norm {norm:.4f}" in said for norm in norms)
    sizes = ("layout.tensor_parallel_size=2", "training.steps=4")
    train(commands, "metric/weight_norm", tmp_path / "four", "--nproc", "4", *(x for s in sizes for x in ("--set", s)))
    assert [line["weight_norm"] for line in records(tmp_path / "four")] == pytest.approx(norms, rel=1e-12)
    train(commands, "metric/weight_norm", tmp_path, "--set", "training.steps=5")
    assert [line["weight_norm"] for line in records(tmp_path)][:4] == norms  # as the resumed run leaves them

    code, said = commands.run("report", str(tmp_path / "example"))
    page = (tmp_path / "example" / "report.html").read_text()
    assert code == 0 and "Weight norm" in page and "weight norm, last value" in page, said
    assert f"{records(tmp_path)[-1]['weight_norm']:.4f}" in page
    run = FollowedRun(tmp_path / "example")
    run.poll()
    assert "Weight norm" in sections(run)["charts"]


def test_a_hook_from_outside_acts_and_resumes(commands: Commands, tmp_path: Path) -> None:
    train(commands, "loop_hook/best_step", tmp_path, "--nproc", "2")

    def best() -> tuple[int, float]:
        found = json.loads((tmp_path / "example" / "best.json").read_text())
        return found["step"], found["validation_loss"]

    def least() -> tuple[int, float]:
        losses = [(line["validation_loss"], line["step"]) for line in records(tmp_path) if "validation_loss" in line]
        assert len(losses) >= 5 and losses[0][1] == 0
        return min(losses)[::-1]

    assert best() == least()
    train(commands, "loop_hook/best_step", tmp_path, "--nproc", "2", "--set", "training.steps=12")
    assert best() == least()


def test_a_family_from_outside_is_imported_and_exported(commands: Commands, tmp_path: Path) -> None:
    """A folder that transformers wrote: its model is refused without the plugin, and with it every tensor comes back
    to the bit. The export runs both models and compares their logits."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPTBigCodeConfig(
        n_layer=2, n_embd=32, n_head=4, n_positions=16, vocab_size=61, bos_token_id=0, eos_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.GPTBigCodeForCausalLM(config)
    for p in model.parameters():
        p.data.normal_(std=0.02)
    model.save_pretrained(str(tmp_path / "theirs"))

    def checkpoint(*arguments: str | Path) -> tuple[int, str]:
        return commands.run("checkpoint", *map(str, arguments), env=of_example("family"))

    code, said = checkpoint("import", tmp_path / "theirs", tmp_path / "ours")
    assert code != 0 and "model_type 'gpt_bigcode'; only gpt2, " in said
    code, said = checkpoint("import", tmp_path / "theirs", tmp_path / "ours", "--plugin", "bigcode")
    assert code == 0, said
    assert 'family = "gpt_bigcode"' in (tmp_path / "ours" / "model.toml").read_text()
    step = next((tmp_path / "ours").glob("step-*"))
    code, said = checkpoint("export", step, tmp_path / "back", "--to", "hf")
    assert code != 0 and "model.family 'gpt_bigcode' is not registered here" in said
    code, said = checkpoint("export", step, tmp_path / "back", "--to", "hf", "--no-tokenizer", "--plugin", "bigcode")
    assert code == 0, said
    again = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "back"))
    assert type(again) is type(model)
    want = dict(model.named_parameters())
    assert want.keys() == dict(again.named_parameters()).keys()
    for name, value in again.named_parameters():
        assert torch.equal(value, want[name]), name


def test_a_mixer_from_outside_is_saved_resumed_and_evaluated(commands: Commands, tmp_path: Path) -> None:
    """A run that stops and resumes ends with the loss of one that does not; its export is refused by name."""
    run, environment = str(EXAMPLES / "mixer/gated_delta_net.toml"), of_example("mixer")

    def train(folder: str, steps: int) -> list[dict[str, object]]:
        """The lines of the run's metrics so far."""
        code, said = commands.run(
            "train", run, "--nproc", "1", "--set", f"output_dir={tmp_path / folder}", "--set",
            f"training.steps={steps}", "--set", "optimizer.decay_steps=8", "--set", "training.eval_interval=4", "--set",
            "training.eval_batches=1", env=environment, seconds=300,
        )
        assert code == 0, said
        return [json.loads(line) for line in next((tmp_path / folder).rglob("metrics.jsonl")).read_text().splitlines()]

    whole = train("whole", 8)
    train("parts", 4)
    parts = train("parts", 8)
    for name in ("loss", "validation_loss"):
        found = [[line[name] for line in lines if name in line][-1] for lines in (whole, parts)]
        assert found[0] == found[1], name
    step = max((tmp_path / "whole").rglob("step-*"))
    code, said = commands.run(
        "checkpoint", "export", str(step), str(tmp_path / "theirs"), "--to", "hf", "--plugin", "gated_delta_net",
        env=environment,
    )
    assert code != 0 and "model.mixer 'gated_delta_net' has no Hugging Face form" in said


@pytest.mark.slow
def test_signum_is_the_papers_formula() -> None:
    """Against plain Python over twenty updates of one element, through the engine's settings."""
    code = """
import torch
from signum_rule import SIGNUM
from megatron_port.core.optim.rules import UpdateSettings
torch.manual_seed(0)
master, state = torch.randn(5, dtype=torch.float64), {"exp_avg": torch.zeros(5, dtype=torch.float64)}
w, m = master.tolist(), [0.0] * 5
for step in range(1, 21):
    g = torch.randn(5, dtype=torch.float64)
    for i, x in enumerate(g.tolist()):
        m[i] = 0.9 * m[i] + 0.1 * x
        w[i] -= 0.01 * ((m[i] > 0) - (m[i] < 0) + 0.3 * w[i])
    SIGNUM.update_(master, g, state, UpdateSettings(step=step, lr=0.01, weight_decay=0.3, beta1=0.9, beta2=0.99, eps=0))
torch.testing.assert_close(master, torch.tensor(w, dtype=torch.float64), rtol=1e-12, atol=1e-12)
torch.testing.assert_close(state["exp_avg"], torch.tensor(m, dtype=torch.float64), rtol=1e-12, atol=1e-12)
"""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{EXAMPLES / 'optimizer'}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def adding(folder: Path, layout: tuple[str, ...], steps: int, ranks: int = 1) -> list[dict[str, Any]]:
    """Run the example whose policy learns to add, in fp64; the lines of its metrics."""
    script = str(EXAMPLES / "addition" / "grpo.py")
    sizes = [f"output_dir={folder}", "precision.dtype=fp64", f"training.steps={steps}", "checkpoint.save_interval=6",
             "batch.micro_batch_size=64", *layout]
    started = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d",
               "--rdzv-endpoint=localhost:0", script] if ranks > 1 else [sys.executable, script]
    done = subprocess.run([*started, *sizes], capture_output=True, text=True, timeout=400, check=False,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (folder / "addition" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_policy_learns_the_same_on_any_layout_and_when_it_is_stopped(tmp_path: Path) -> None:
    """Samples, rewards and losses: of one process; of two ranks; of one that ends, and another layout that goes on."""
    alone = adding(tmp_path / "alone", (), 14)
    assert len({row["reward"] for row in alone if "reward" in row}) > 8
    split = adding(tmp_path / "split", ("layout.tensor_parallel_size=2",), 14, ranks=2)
    stopped = tmp_path / "stopped"
    adding(stopped, ("optimizer.decay_steps=14",), 14)
    for path in (stopped / "addition" / "checkpoints").glob("*12"):
        shutil.rmtree(path)  # so that the last six steps and more are taken again
    again = adding(stopped, ("layout.data_parallel_size=2", "batch.micro_batch_size=32"), 14, ranks=2)
    assert [row["step"] for row in again] == list(range(1, 15))
    for rows in (split, again):
        for ours, theirs in zip(rows, alone, strict=True):
            for name in ("loss", "reward", "grad_norm", "policy_ratio"):
                assert ours.get(name, 0) == pytest.approx(theirs.get(name, 0), rel=1e-7, abs=1e-9), (name, ours["step"])
