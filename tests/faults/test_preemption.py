"""A scheduler's signal at every kind of moment: a committed save, all ranks gone together, the right exit code, and a
resume that is bit-equal to a run which nobody stopped.

tests/e2e stops runs between steps with SIGUSR1, tests/slurm through a real scheduler; here are the moments
that those do not choose, and signals that reach one rank only.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Command, Commands
from small_runs import Layout, Run, resumed_at, trajectory

from megatron_port.core.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_REQUEUE
from megatron_port.run import launch_record as records
from megatron_port.run.run_files import read_history

LAYOUT = Layout(tp=2)
STEPS = 10
SETS = (
    "checkpoint.save_interval=4", "checkpoint.keep=0", "training.eval_interval=3", "training.eval_batches=8",
)
TRIES = 4
LEAVE_S = 60.0


def evaluating(run: Run) -> bool:
    """The last line is that of a step after which an evaluation follows."""
    rows = run.rows()
    return bool(rows) and "loss" in rows[-1] and rows[-1]["step"] % 3 == 0


def saving(run: Run) -> bool:
    """A save is under way."""
    return run.saving() > 0


def stepping(run: Run) -> bool:
    """The last line is that of a step after which neither an evaluation nor a save follows."""
    rows = run.rows()
    return bool(rows) and "loss" in rows[-1] and rows[-1]["step"] % 3 != 0 and rows[-1]["step"] % 4 != 0


def starting(run: Run) -> bool:
    """The ranks have been forked, and no step is done. The loop is not there yet to see the signal."""
    return not run.rows()


MOMENTS: dict[str, Callable[[Run], bool]] = {
    "step": stepping, "evaluation": evaluating, "save": saving, "start": starting,
}


@pytest.fixture(scope="module")
def whole(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that nobody stopped."""
    run = Run(tmp_path_factory.mktemp("whole"), "whole", LAYOUT, *SETS, steps=STEPS)
    code, output = commands.run(*run.command())
    assert code == 0, output
    return run


def send_at(command: Command, run: Run, moment: str, number: signal.Signals, rank: int | None) -> bool:
    """Wait for the moment and send the signal to the launcher, or to one rank. True if it was still that moment after.

    The launcher of a forked command needs an instant to fork its ranks and to take over the signals.
    """
    there = MOMENTS[moment]
    until = time.monotonic() + 90
    while len(command.ranks(9)) < LAYOUT.ranks or (moment != "start" and not there(run)):
        assert command.poll() is None and time.monotonic() < until, command.output()
        time.sleep(0.001)
    if moment == "start":
        time.sleep(0.3)
    os.kill(command.pid if rank is None else command.ranks(9)[rank], number)
    return there(run)


USR1, TERM, INT = (signal.SIGUSR1, EXIT_REQUEUE), (signal.SIGTERM, EXIT_OK), (signal.SIGINT, EXIT_INTERRUPTED)
CASES = [("step", *TERM), ("save", *USR1)]
LONG = [
    ("step", *INT),  # tests/e2e/test_train_cli.py presses Ctrl-C
    ("step", *USR1), ("evaluation", *TERM), ("save", *TERM), ("start", *USR1), ("evaluation", *USR1), ("start", *TERM),
]


@pytest.mark.parametrize(
    ("moment", "number", "code"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in LONG)],
    ids=lambda v: v.name if isinstance(v, signal.Signals) else str(v),
)
def test_stopped_at(
    commands: Commands, tmp_path: Path, whole: Run, moment: str, number: signal.Signals, code: int
) -> None:
    for attempt in range(TRIES):
        # Rank 1 alone hears SIGTERM: the ranks must agree. SIGUSR1 goes to the launcher, as srun sends it to all.
        rank = 1 if number == signal.SIGTERM else None
        run = Run(tmp_path / str(attempt), "stopped", LAYOUT, *SETS, steps=STEPS)
        command = commands.start(*run.command())
        try:
            met = send_at(command, run, moment, number, rank)
            ended = command.wait(LEAVE_S)
            assert command.all_down(5.0) is not None, "a process was left behind"
        finally:
            command.end()
        steps = run.steps_done()
        if moment == "start" or (met and steps and steps[-1]["step"] < STEPS):
            break
    output = command.output()
    assert met, f"the signal missed the {moment} {TRIES} times"
    assert ended == code, f"exit {ended}\n{output}"
    assert "Traceback" not in output and "error:" not in output and "lost contact" not in output, output
    done = max((row["step"] for row in run.steps_done()), default=0)
    assert done < STEPS and run.committed() == done, (done, run.committed(), output)
    assert f"after step {done}" in output, output
    assert not list(run.checkpoints.glob("*.tmp"))

    again, output = commands.run(*run.command())
    assert again == 0 and resumed_at(output) == done, output
    assert trajectory(run.steps_done()) == trajectory(whole.steps_done())
    validation = [[(r["step"], r["validation_loss"]) for r in x.rows() if "validation_loss" in r] for x in (run, whole)]
    assert validation[0] == validation[1]
    last = [str(r.checkpoints / f"step-{STEPS:08d}") for r in (run, whole)]
    same, output = commands.run("checkpoint", "diff", *last, "--kind", "all")
    assert same == 0 and re.search(r"^0 of \d+ tensors differ", output, re.M), output


def test_a_job_that_is_cancelled_after_its_warning_does_not_ask_to_come_back(
    commands: Commands, tmp_path: Path
) -> None:
    """SIGUSR1 to all ranks, as the batch script sends it, then SIGTERM to one before the step has ended."""
    run = Run(tmp_path, "cancelled", LAYOUT, *SETS, steps=STEPS)
    command = commands.start(*run.command())
    try:
        until = time.monotonic() + 90
        while len(command.ranks(9)) < LAYOUT.ranks:
            assert command.poll() is None and time.monotonic() < until, command.output()
            time.sleep(0.001)
        time.sleep(0.3)  # the ranks keep both signals until the loop is there
        os.kill(command.pid, signal.SIGUSR1)
        os.kill(command.ranks(9)[1], signal.SIGTERM)
        ended = command.wait(LEAVE_S)
    finally:
        command.end()
    assert ended == EXIT_OK, command.output()
    assert json.loads((run.folder / "outcome.json").read_text())["signal"] == "SIGTERM"


def test_launch_cancel_stops_a_run_that_no_scheduler_started(commands: Commands, tmp_path: Path) -> None:
    """By its process on this host; on another host by a mark that rank 0 sees at its next heartbeat (every second)."""
    run = Run(tmp_path, "cancelled", LAYOUT, *SETS, "checkpoint.lease_seconds=6", steps=100000)
    for number, here in enumerate((True, False), 1):
        begun = len(run.steps_done())
        command = commands.start(*run.command())
        try:
            until = time.monotonic() + 90
            while len(run.steps_done()) < begun + 2:
                assert command.poll() is None and time.monotonic() < until, command.output()
                time.sleep(0.01)
            if here:
                code, said = commands.run("launch", "cancel", str(run.folder))
                assert code == 0 and "SIGTERM sent" in said, said
            else:
                records.cancel(records.record_folder(run.folder, number), "ann@elsewhere")
            ended = command.wait(LEAVE_S)
        finally:
            command.end()
        done = run.steps_done()[-1]["step"]
        assert ended == EXIT_OK and run.committed() == done, command.output()
    [first, second] = read_history(run.folder)
    assert (first.status, second.status, second.record, second.step) == ("saved", "saved", "0002", done)
    assert second.cause == "SIGTERM" and first.step < second.step
