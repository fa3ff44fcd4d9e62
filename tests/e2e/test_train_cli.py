"""The commands as a user types them: train, stop, resume, verify, generate; exit codes, messages, nothing left behind.

One tiny model on two ranks and synthetic tokens. Each command is a process of its own, in a session of its own, so
that a rank that outlives it is found. Some are fresh interpreters; most are forked from one that has imported torch.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import pytest
from commands import Commands

from megatron_port.core import errors

ROOT = Path(__file__).resolve().parents[2]
STEPS = 50
"""Of the run that is not interrupted; enough that a signal sent at step 3 arrives before the end."""
LIMIT_S = 300
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "ROLE_", "SLURM_", "TORCHELASTIC_", "PMI_", "OMPI_")

RUN_FILE = """
name = "run"
engine = "native"
[model]
num_layers = 2
hidden_size = 32
num_attention_heads = 4
vocab_size = 300
seq_length = 32
hidden_dropout = 0.1
[layout]
tensor_parallel_size = 2
sequence_parallel = true
zero_stage = 0
vocab_padding_multiple = 8
[batch]
micro_batch_size = 2
global_batch_size = 4
[precision]
dtype = "fp32"
[optimizer]
lr = 1e-2
warmup_steps = 2
decay_steps = 100
[data]
synthetic = true
tokenizer = "byte"
[checkpoint]
keep = 0
"""


def environment() -> dict[str, str]:
    """Ours without what a launcher may have left in it."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}


def left_behind(session: int) -> list[str]:
    """Command lines of living processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, sid = (path / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(sid) == session and state not in "ZX":
                found.append((path / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    """``python COMMAND`` with both streams in one pipe; whatever is left of it is killed on the way out."""
    process = subprocess.Popen(
        [sys.executable, *command], env=environment(), cwd=ROOT, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )
    try:
        yield process
        assert left_behind(process.pid) == []
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def python(*command: str) -> str:
    """Run ``python COMMAND`` in a fresh interpreter; its output."""
    with started(*command) as process:
        output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0 and "Traceback" not in output, f"exit {process.returncode}:\n{output}"
    return output


class Port(Protocol):
    """Runs ``megatron-port COMMAND`` and returns its output, once its exit code is ``code`` and it left no process."""

    def __call__(self, *command: str, code: int = 0) -> str: ...


@pytest.fixture(scope="module")
def port(commands: Commands) -> Port:
    def run(*words: str, code: int = 0) -> str:
        command = commands.start(*words)
        try:
            ended, output = command.wait(LIMIT_S), command.output()
            assert ended == code, f"exit {ended}, expected {code}:\n{output}"
            assert "Traceback" not in output and not command.living(), output
        finally:
            command.end()
        return output

    return run


def stopped_by(number: signal.Signals, *command: str) -> tuple[int, str]:
    """Run, send the signal to the parent alone after the third step, and wait: (exit code, output)."""
    with started("-m", "megatron_port", *command) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step 3/"):
                process.send_signal(number)
        process.wait(LIMIT_S)
    return process.returncode, "".join(lines)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with run.toml."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "run.toml").write_text(f'output_dir = "{folder / "runs"}"\n{RUN_FILE}')
    return folder


def train_command(home: Path, name: str, *sets: str, steps: int = STEPS, nproc: int = 2) -> list[str]:
    values = (f"name={name}", f"training.steps={steps}", *sets)
    options = [part for value in values for part in ("--set", value)]
    return ["train", str(home / "run.toml"), *(["--nproc", str(nproc)] if nproc else []), *options]


@pytest.fixture(scope="module")
def finished(home: Path) -> tuple[Path, str]:
    """(folder of a run that was never interrupted, its output)."""
    return home / "runs" / "whole", python("-m", "megatron_port", *train_command(home, "whole"))


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}"


def test_a_run_trains_and_says_so_once(finished: tuple[Path, str], port: Port) -> None:
    folder, output = finished
    rows = metrics(folder)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    losses = [row["loss"] for row in rows]
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 0.4, losses
    assert all(row["samples"] == 4 * row["step"] and row["tokens"] == 32 * row["samples"] for row in rows)
    # One rank speaks: each step line, and what was chosen, once.
    assert [int(n) for n in re.findall(rf"^step (\d+)/{STEPS} ", output, re.M)] == list(range(1, STEPS + 1))
    for once in ("attention  ", "parameters; layout tp 2 x pp 1 x dp 1, sequence parallel", "saved "):
        assert output.count(once) == 1, output
    assert (folder / "config.toml").is_file()
    whole = port("checkpoint", "verify", str(folder))
    assert f"{checkpoint(folder, STEPS).name}: whole: 2 files" in whole and "every hash matches" in whole


def test_ctrl_c_saves_and_the_run_goes_on_as_if_nothing_had_happened(
    home: Path, finished: tuple[Path, str], port: Port
) -> None:
    """SIGINT to the parent alone. Every loss, weight and moment is that of the run that was not interrupted."""
    command = train_command(home, "interrupted")
    code, output = stopped_by(signal.SIGINT, *command)
    assert code == errors.EXIT_INTERRUPTED and "Traceback" not in output, output
    folder = home / "runs" / "interrupted"
    done = metrics(folder)[-1]["step"]
    assert 3 <= done < STEPS and f"stopped by SIGINT after step {done}" in output, output
    assert checkpoint(folder, done).is_dir()
    output = port(*command)
    assert f"at step {done}, {4 * done} samples" in output
    assert re.findall(r"^step (\d+)/", output, re.M)[0] == str(done + 1)
    ours, whole = metrics(folder), metrics(finished[0])
    for field in ("step", "loss", "grad_norm", "learning_rate", "samples", "tokens"):
        assert [row[field] for row in ours] == [row[field] for row in whole], field
    same = port(
        "checkpoint", "diff", str(checkpoint(folder, STEPS)), str(checkpoint(finished[0], STEPS)), "--kind", "all"
    )
    assert re.search(r"^0 of \d+ tensors differ", same, re.M), same
    differ = port("checkpoint", "diff", str(checkpoint(folder, done)), str(checkpoint(folder, STEPS)), code=1)
    assert "max |a - b|" in differ


@pytest.mark.slow
def test_usr1_asks_to_be_queued_again_and_another_engine_goes_on(home: Path, port: Port) -> None:
    """DeepSpeed on two stages is told to leave; native takes over on the same file with tensor parallelism."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    deepspeed = (
        "engine=deepspeed", "layout.tensor_parallel_size=1", "layout.pipeline_parallel_size=2",
        "layout.sequence_parallel=false", "layout.zero_stage=1",
    )
    code, output = stopped_by(signal.SIGUSR1, *train_command(home, "requeued", *deepspeed, steps=1000))
    assert code == errors.EXIT_REQUEUE == 85 and "Traceback" not in output, output
    folder = home / "runs" / "requeued"
    rows = metrics(folder)
    done = rows[-1]["step"]
    assert f"stopped by SIGUSR1 after step {done}" in output and checkpoint(folder, done).is_dir()
    assert f"at step {done}, " in port(*train_command(home, "requeued", steps=done + 2))
    after = metrics(folder)
    assert [row["step"] for row in after] == list(range(1, done + 3)) and after[:done] == rows


def test_a_layout_that_does_not_fit_the_ranks(home: Path, port: Port) -> None:
    output = port(*train_command(home, "misfit", nproc=3), code=errors.EXIT_CONFIG)
    assert output.startswith("error: ") and "3 ranks" in output and "tensor_parallel_size 2" in output, output
    assert not (home / "runs" / "misfit").exists()


def test_a_flipped_byte_is_found_and_named_once(
    home: Path, finished: tuple[Path, str], tmp_path: Path, port: Port
) -> None:
    """The file of rank 1, in the middle of the weights: every rank stops, nothing was trained."""
    damaged = tmp_path / checkpoint(finished[0], STEPS).name
    shutil.copytree(checkpoint(finished[0], STEPS), damaged)
    shard = damaged / "rank-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    output = port(
        *train_command(home, "damaged", f"checkpoint.resume={damaged}", steps=STEPS + 1), code=errors.EXIT_CHECKPOINT
    )
    assert output.count("error: ") == 1 and output.count("rank-00001.safetensors") == 1, output
    assert "does not match its hash" in output and not re.search(r"^step \d", output, re.M)
    assert "DAMAGED" in port("checkpoint", "verify", str(damaged), code=errors.EXIT_CHECKPOINT)


def test_a_damaged_newest_checkpoint_is_passed_over(home: Path, finished: tuple[Path, str], port: Port) -> None:
    """Only rank 1 meets the flipped bit; both ranks fall back, rank 0 says so, and every loss is the unbroken run's."""
    saves = ("checkpoint.save_interval=3",)
    assert port(*train_command(home, "fallback", *saves, steps=6)).count("saved ") == 2
    folder = home / "runs" / "fallback"
    shard = checkpoint(folder, 6) / "rank-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-5] ^= 64
    shard.write_bytes(content)
    output = port(*train_command(home, "fallback", *saves, steps=8))
    assert output.count("falling back from step-00000006 to step-00000003; nothing of step-00000006 is used") == 1
    assert "rank 1 on" in output and "rank-00001.safetensors: block 0" in output and "at step 3, 12 samples" in output
    rows = [(row["step"], row["loss"]) for row in metrics(folder)]
    assert rows == [(row["step"], row["loss"]) for row in metrics(finished[0])][:8]
    port("checkpoint", "verify", str(folder))  # step 6 was saved again


def test_generation_is_the_same_on_one_rank_and_on_two(finished: tuple[Path, str], port: Port) -> None:
    command = ("generate", str(finished[0]), "--prompt", "abcdefgh", "--temperature", "0", "--tokens", "24")
    one = port(*command)
    assert one.startswith("abcdefgh") and len(one) > len("abcdefgh\n")
    two = port(
        *command, "--nproc", "2", "--set", "layout.tensor_parallel_size=2", "--set", "layout.sequence_parallel=true"
    )
    assert two == one


def test_torchrun_starts_the_same_run_and_more_steps_go_on_from_its_end(
    home: Path, finished: tuple[Path, str], port: Port
) -> None:
    """Two fresh interpreters, then two forks, then nothing left to do: the same losses, to the bit, each once."""
    python(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "megatron_port",
        *train_command(home, "longer", steps=5, nproc=0),
    )
    folder, whole = home / "runs" / "longer", [(row["step"], row["loss"]) for row in metrics(finished[0])]
    assert [(row["step"], row["loss"]) for row in metrics(folder)] == whole[:5]
    port(*train_command(home, "longer", steps=8))
    rows = metrics(folder)
    assert [(row["step"], row["loss"]) for row in rows] == whole[:8]
    assert not re.search(r"^step \d", port(*train_command(home, "longer", steps=8)), re.M)
    assert metrics(folder) == rows
