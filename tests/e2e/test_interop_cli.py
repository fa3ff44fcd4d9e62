"""``checkpoint export`` and ``import`` as a user types them, and training that starts from the result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import Commands

from megatron_port.cli.main import main

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


class Folder:
    """A folder in which ``megatron-port`` is run."""

    def __init__(self, path: Path, commands: Commands) -> None:
        self.path, self._commands = path, commands

    def run(self, *arguments: str) -> str:
        """Output of a command that ends well."""
        command = self._commands.start(*arguments, cwd=self.path)
        assert command.wait(LIMIT_S) == 0, command.output()
        return command.output()


def losses(folder: Path, name: str) -> dict[int, float]:
    """Step → loss of a run."""
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {r["step"]: r["loss"] for r in records if "loss" in r}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, commands: Commands) -> Folder:
    """A folder with a run of 5 steps that has checkpoints of steps 3 and 5."""
    folder = Folder(tmp_path_factory.mktemp("interop"), commands)
    (folder.path / "run.toml").write_text(RUN_FILE)
    folder.run("train", "run.toml", "--set", "training.steps=5", "--set", "checkpoint.save_interval=3")
    return folder


@pytest.mark.parametrize("form", ["dcp", pytest.param("universal", marks=pytest.mark.slow)])
def test_out_and_in_and_on(trained: Folder, form: str) -> None:
    """Step 3 goes out, comes back, and gives the losses of steps 4 and 5 that the run itself had."""
    step = "runs/run/checkpoints/step-00000003"
    assert form in trained.run("checkpoint", "export", step, "--to", form, f"out/{form}").replace(
        "load_universal", "universal"
    )
    said = trained.run("checkpoint", "import", f"out/{form}", f"in/{form}")
    place = f"in/{form}/step-00000003"
    assert f"checkpoint.resume={place}" in said
    assert "0 of" in trained.run("checkpoint", "diff", step, place, "--kind", "all")
    trained.run("train", "run.toml", "--set", f"name={form}", "--set", "training.steps=5", "--set",
            f"checkpoint.resume={place}")
    first, again = losses(trained.path, "run"), losses(trained.path, form)
    assert set(again) == {4, 5} and all(again[s] == first[s] for s in again)


@pytest.mark.slow
def test_weights_alone_start_a_run(trained: Folder) -> None:
    """Weights of step 5 are a new run's first: its first loss is that of trained weights, its counters are at 0."""
    trained.run("checkpoint", "export", "runs/run/checkpoints/step-00000005", "--to", "dcp", "out/weights")
    trained.run("checkpoint", "import", "out/weights", "in/weights", "--weights-only")
    trained.run("train", "run.toml", "--set", "name=tuned", "--set", "training.steps=1", "--set",
            "checkpoint.resume=in/weights/step-00000000")
    assert losses(trained.path, "tuned")[1] < losses(trained.path, "run")[1]


def test_errors_are_one_message(
    trained: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(trained.path)
    (trained.path / "mds").mkdir(exist_ok=True)
    (trained.path / "mds" / "mp_rank_00_model_states.pt").write_bytes(b"x")
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
