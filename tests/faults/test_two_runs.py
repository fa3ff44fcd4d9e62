"""Two attempts in one run folder, and a run that resumes with other settings: real commands, real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

from commands import Command, Commands
from small_runs import Layout, Run, resumed_at, trajectory

from megatron_port.core.checkpoint.reader import checkpoints_in
from megatron_port.core.errors import EXIT_CHECKPOINT, EXIT_CONFIG
from megatron_port.run.lease import Holder, lease_file, newest_epoch, read_holder
from megatron_port.run.provenance import read_identity
from megatron_port.tools.report.run_data import read_run

SETS = ("checkpoint.save_interval=4", "checkpoint.keep=2")


def until(command: Command, there: Callable[[], bool]) -> None:
    """Wait while the command runs."""
    end = time.monotonic() + 90
    while not there():
        assert command.poll() is None and time.monotonic() < end, command.output()[-3000:]
        time.sleep(0.01)


def steps(run: Run) -> list[int]:
    return [row["step"] for row in run.steps_done()]


def errors_in(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("error:")]


def test_a_second_start_is_refused_and_the_first_loses_nothing(commands: Commands, tmp_path: Path) -> None:
    """It used to end one of them with exit 5, and rows of metrics.jsonl were lost. Then the first is killed, and the
    next start has the folder at once.
    """
    run = Run(tmp_path, "run", Layout(dp=2), *SETS, steps=100000)
    first = commands.start(*run.command())
    try:
        until(first, lambda: run.committed() >= 4)
        seen, before = steps(run)[-1], (run.folder / "config.toml").read_bytes()
        code, output = commands.run(*run.command(), "--set", "optimizer.lr=0.5")
        assert code == EXIT_CONFIG and len(errors_in(output)) == 1 and "Traceback" not in output, output
        holder, _ = read_holder(run.folder, 1)
        assert f"is in use by attempt local on {holder.host}, process {holder.pid}" in output, output
        assert holder.pid in first.ranks(2) and "--set name=run-2" in output and f"kill {holder.pid}" in output
        until(first, lambda: steps(run)[-1] >= seen + 8)
        there = steps(run)  # read once: the run goes on
        assert there == list(range(1, len(there) + 1)) and newest_epoch(run.folder) == 1
        assert (run.folder / "config.toml").read_bytes() == before
        assert not any(e["event"] == "failed" for e in read_run(run.folder).events)
        whole = trajectory(run.steps_done())
        assert {m.lineage.epoch for _, m in checkpoints_in(run.checkpoints)} == {1}

        os.kill(first.pid, signal.SIGKILL)
        done = run.committed()
        # One save beside training, and one at the end, which is synchronous.
        last = Run(tmp_path, "run", Layout(dp=2), *SETS, steps=max(whole) // 4 * 4 + 6)
        code, output = commands.run(*last.command())
        assert code == 0 and (resumed_at(output) or 0) >= done, output
        assert f"process {holder.pid} is gone" in output and "watching its heartbeat" not in output
        assert steps(last) == list(range(1, last.steps + 1))
        ours = trajectory(last.steps_done())
        assert all(ours[step] == whole[step] for step in whole)
        assert not list(last.checkpoints.glob("*.tmp"))
        made, identity = [m.lineage for _, m in checkpoints_in(run.checkpoints)], read_identity(run.folder)
        assert identity is not None and [(m.run, m.epoch) for m in made] == [(identity.id, 2)] * 2, made
        assert made[0].commit == made[1].commit + 1 and made[0].parent is not None
        assert made[0].parent.commit == made[1].commit
    finally:
        first.end()


def test_a_run_that_was_taken_over_stops_and_writes_nothing_more(commands: Commands, tmp_path: Path) -> None:
    """Another host took it for dead: both ranks stop at the step's end, with one message, and leave the rest alone."""
    run = Run(tmp_path, "run", Layout(dp=2), *SETS, steps=100000)
    command = commands.start(*run.command())
    try:
        until(command, lambda: run.committed() >= 4)
        other = run.checkpoints / "step-00099999.e2.tmp"
        other.mkdir()
        holder = Holder(epoch=2, attempt="77.0", job="77", host="node7", pid=1, since=1.0)
        part = run.folder / "lease" / "part"
        part.write_text(json.dumps(holder.to_json()))
        os.link(part, lease_file(run.folder, 2))
        rows, there = len(run.rows()), sorted(p.name for p in run.checkpoints.glob("step-*"))
        assert command.wait(90) == EXIT_CONFIG
    finally:
        command.end()
    output = command.output()
    assert len(errors_in(output)) == 1 and "Traceback" not in output, output
    assert "taken over by attempt 77.0 (SLURM job 77) on node7" in errors_in(output)[0]
    assert len(run.rows()) <= rows + 1 and other.is_dir()  # a step may have been under way
    after = sorted(p.name for p in run.checkpoints.glob("step-*"))
    assert set(there) - set(after) <= {name for name in there if ".e1." in name}
    assert set(after) - set(there) == set(), (there, after)
    assert not read_holder(run.folder, 2)[0].released
    assert not (run.folder / "outcome.json").exists()


def test_settings_that_change_at_a_resume(commands: Commands, tmp_path: Path) -> None:
    """A batch: exit 2, with the numbers and a schedule that works. A folder of another run: exit 5."""
    def train(name: str, count: int, *sets: str) -> tuple[int, str]:
        return commands.run(*Run(tmp_path, name, Layout(), *SETS, "optimizer.decay_steps=0", *sets,
                                 steps=count).command())

    assert train("a", 8)[0] == 0
    code, output = train("a", 16, "batch.global_batch_size=8")
    assert code == EXIT_CONFIG and len(errors_in(output)) == 1, output
    assert "32 samples were consumed in its 8 steps" in output and "begins at sample 64" in output
    grown = re.findall(r"batch\.rampup_\w+ = \d+", errors_in(output)[0])
    code, output = train("a", 16, "batch.global_batch_size=8", "model.hidden_dropout=0.2",
                         *(text.replace(" ", "") for text in grown))
    assert code == 0 and resumed_at(output) == 8, output
    assert "model.hidden_dropout 0.1 -> 0.2" in output
    assert re.search(r"^the learning rate jumps from 0 to \S+ at step 8$", output, re.M), output
    run = Run(tmp_path, "a", Layout(), steps=16)
    assert [row["samples"] for row in run.steps_done()] == [*range(4, 36, 4), *range(40, 104, 8)]

    (tmp_path / "runs" / "b" / "checkpoints").mkdir(parents=True)
    (run.checkpoints / "step-00000016").rename(tmp_path / "runs" / "b" / "checkpoints" / "step-00000016")
    code, output = train("b", 20)
    assert code == EXIT_CHECKPOINT and 'saved by another run, "a"' in output and len(errors_in(output)) == 1, output
    shown = [e for e in read_run(run.folder).events if e["event"] == "failed"]
    assert shown == [], shown
