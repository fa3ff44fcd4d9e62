"""A disk that fills up and a folder that cannot be written, for real: training continues, saves are retried.

The full disk is a small tmpfs under a run of two ranks; modes bind the process that meets the forbidden folder.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megatron_port.ext.telemetry.metrics import decode
from megatron_port.ext.telemetry.step_metrics import step_metrics

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534
RUN_FILE = """
name = "run"
engine = "native"
[model]
num_layers = 2
hidden_size = 64
num_attention_heads = 4
vocab_size = 300
seq_length = 32
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
decay_steps = 100
[data]
synthetic = true
tokenizer = "byte"
[training]
steps = 100000
[checkpoint]
keep = 1
save_interval = 4
max_failures = 0
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB: room for two or three checkpoints of 1.4 MB."""
    place = tmp_path / "small"
    place.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def environment() -> dict[str, str]:
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "TORCHELASTIC_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(launchers)}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}


def losses(folder: Path) -> dict[int, float]:
    """By step; a line that the disk cut off is there once more, whole."""
    rows = [decode(line, step_metrics()) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {int(row["step"]): float(row["loss"]) for row in rows if row is not None}


def test_a_disk_that_fills_up_while_training(small_disk: Path) -> None:
    """Filled by somebody else after the first save; freed after the second failure; then stopped. And it resumes."""
    (small_disk / "run.toml").write_text(f'output_dir = "{small_disk}"\n{RUN_FILE}')
    command = [sys.executable, "-m", "megatron_port", "train", str(small_disk / "run.toml"), "--nproc", "2"]
    ballast = small_disk / "ballast"
    lines: list[str] = []
    at_full: list[str] = []
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), text=True, start_new_session=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )
    try:
        assert process.stdout is not None
        stage, failures = "filling", 0
        for line in process.stdout:
            lines.append(line)
            if stage == "filling" and line.startswith("saved "):
                with suppress(OSError), open(ballast, "wb", buffering=0) as stream:
                    while stream.write(bytes(1 << 16)):
                        pass
                stage = "full"
            elif stage == "full" and "was not saved" in line:
                failures += 1
                if failures == 2:
                    at_full = sorted(p.name for p in (small_disk / "run" / "checkpoints").glob("step-*"))
                    ballast.unlink()
                    stage = "freed"
            elif stage == "freed" and line.startswith("saved "):
                process.send_signal(signal.SIGINT)
                stage = "stopping"
        process.wait(60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    output = "".join(lines)
    assert process.returncode == 130 and "Traceback" not in output, output[-3000:]
    failed = [line for line in lines if "was not saved" in line]
    assert len(failed) >= 2 and all("No space left on device" in line for line in failed), failed
    told = r"checkpoints/step-\d+\.e\d+\.tmp/?\S*: .*needed \d+ bytes, free \d+ bytes"
    assert all(re.search(told, line) for line in failed), failed
    assert output.count("training continues, and the next save") == len(failed)
    # The one that was whole when the disk filled up is whole, and no half one took its place.
    assert len([name for name in at_full if not name.endswith(".tmp")]) == 1, at_full
    steps = [int(n) for n in re.findall(r"^step (\d+)/", output, re.M)]
    assert steps == list(range(1, steps[-1] + 1))
    assert f"saved {small_disk}" in output and "that failed)" in output
    verified = subprocess.run(
        [sys.executable, "-m", "megatron_port", "checkpoint", "verify", str(small_disk / "run")], cwd=ROOT,
        env=environment(), capture_output=True, text=True,
    )
    assert verified.returncode == 0 and "every hash matches" in verified.stdout, verified.stdout
    found = losses(small_disk / "run")  # metrics lines that the disk refused are there too
    assert sorted(found) == steps


# ---------------------------------------------------------------- before it starts


@pytest.mark.parametrize("how", ["read-only", "full", "too small", "a file"])
def test_an_output_folder_that_cannot_hold_the_run(small_disk: Path, how: str, commands: Any) -> None:
    """One error that names the folder and the numbers, exit 3, before the ranks meet; nothing is left behind."""
    folder, says, settings = small_disk / "out", "", []
    if how == "read-only":
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        says = "Read-only file system"
    elif how == "full":
        with suppress(OSError), open(small_disk / "ballast", "wb", buffering=0) as stream:
            while stream.write(bytes(1 << 12)):
                pass
        says = "No space left on device"
    elif how == "too small":
        settings = ["--set", "model.vocab_size=20000"]
        says = "bytes are free, and one checkpoint of this run takes "
    else:
        folder.write_text("")
        says = "Not a directory"
    run_file = Path(tempfile.mkdtemp(dir=small_disk.parent)) / "run.toml"
    run_file.write_text(f'output_dir = "{folder}"\n{RUN_FILE}')
    code, output = commands.run("train", str(run_file), "--nproc", "2", *settings)
    errors = [line for line in output.splitlines() if "error:" in line]
    assert code == 3 and len(errors) == 1 and "Traceback" not in output, output
    assert f"{folder}/run: " in errors[0] and says in errors[0] and "choose another output_dir" in errors[0]
    assert "ranks met" not in output and "step 1/" not in output
    assert not folder.is_dir() or not list((folder / "run").glob("*"))


# ---------------------------------------------------------------- without root's rights


def _without_rights(folder: str) -> dict[str, Any]:
    """Save, forbid, save, permit, save; in a process that modes bind."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "unit")]
    from test_checkpoint_background import Stub, at

    from megatron_port.core.checkpoint.reader import open_checkpoint
    from megatron_port.run.hooks import Saving

    with tempfile.TemporaryDirectory() as warm:  # import all that is imported late, while we may still read it
        stub = Stub(Path(warm))
        Saving(stub, stub.session).final(at(1))  # type: ignore[arg-type]
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    stub = Stub(Path(folder))
    saving = Saving(stub, stub.session)  # type: ignore[arg-type]
    said: dict[str, Any] = {}
    for step, mode in ((5, 0o755), (10, 0o555), (15, 0o755)):
        if stub.home.exists():
            stub.home.chmod(mode)
        saving.save(at(step))
        saving.finish()
        said[str(step)] = stub.lines[-1]
        said[f"there {step}"] = sorted(p.name for p in stub.home.glob("step-*"))
        open_checkpoint(stub.home / said[f"there {step}"][-1]).verify()
    # A quota on one file: the writing itself is refused, half-way.
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    saving.save(at(20))
    saving.finish()
    said["20"], said["there 20"] = stub.lines[-1], sorted(p.name for p in stub.home.glob("step-*"))
    open_checkpoint(stub.home / said["there 20"][-1]).verify()
    return said


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_and_a_file_size_limit() -> None:
    folder = tempfile.mkdtemp(prefix="forbidden-")
    try:
        done = subprocess.run(
            [sys.executable, __file__, folder], env=environment(), capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        said = json.loads(done.stdout.splitlines()[-1])
    finally:
        shutil.rmtree(folder)
    assert said["5"].startswith("saved ") and said["there 5"] == ["step-00000005"]
    assert "Permission denied" in said["10"] and "write permission" in said["10"] and "training continues" in said["10"]
    assert said["there 10"] == ["step-00000005"]
    assert said["15"].startswith("saved ") and "(after 1 that failed)" in said["15"]
    assert "File too large" in said["20"] and "needed " in said["20"] and said["there 20"] == said["there 15"]


if __name__ == "__main__":
    print(json.dumps(_without_rights(sys.argv[1])))
