"""Ranks that are lost while a run trains are replaced within the job, and the run is bit for bit the unbroken one.

Real runs, ``megatron-port train --nproc 4``, with faults at stated moments (``fault_moments``).
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_port.core.checkpoint.format import read_manifest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from commands import Commands
from control_group import killed, little_memory
from fault_moments import moment, struck, write_moments
from small_runs import Layout, Run

ROOT = Path(__file__).resolve().parents[2]
LAYOUT = Layout(tp=2, pp=1, dp=2)
STEPS = 16


def settings(copies: Path) -> tuple[str, ...]:
    return (
        'launch.when_lost="replace"', "checkpoint.memory_interval=1", f'checkpoint.memory_folder="{copies}"',
        "checkpoint.save_interval=6", "training.eval_interval=5", "training.eval_batches=1", "watch.hang_seconds=4",
        "checkpoint.keep=0",
    )


def facts(run: Run) -> dict[int, Any]:
    """All numbers of the run by step; a step that has two rows is an error."""
    rows = run.rows()
    steps = [row["step"] for row in rows if "loss" in row]
    assert steps == sorted(set(steps)), steps
    found: dict[int, Any] = {row["step"]: (row["loss"], row["grad_norm"]) for row in rows if "loss" in row}
    checked = [row for row in rows if "validation_loss" in row]
    assert len({row["step"] for row in checked}) == len(checked)
    return {**found, -1: {row["step"]: row["validation_loss"] for row in checked}}


def weights(run: Run) -> list[str]:
    """Hashes of the last checkpoint's files."""
    return [entry.hash for entry in read_manifest(run.checkpoints / f"step-{run.steps:08d}").files.values()]


@pytest.fixture(scope="module")
def unbroken(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Run:
    home = tmp_path_factory.mktemp("unbroken")
    run = Run(home, "unbroken", LAYOUT, "checkpoint.save_interval=6", "training.eval_interval=5",
              "training.eval_batches=1", "checkpoint.keep=0", steps=STEPS)
    code, output = commands.run(*run.command(), seconds=200)
    assert code == 0, output[-3000:]
    return run


def broken(commands: Commands, home: Path, moments: list[dict[str, object]], *more: str, steps: int = STEPS) -> tuple[
        Run, int, str]:
    run = Run(home, "broken", LAYOUT, *settings(home / "memory"), *more, steps=steps)
    hook = write_moments(home / "hook", [{**m, "folder": m["folder"] or str(home / "memory")} for m in moments])
    (home / "memory").mkdir(exist_ok=True)
    command = commands.start(*run.command(), load="faults_at_moments", env={"PYTHONPATH": f"{hook}:{ROOT}"})
    try:
        code = command.wait(280)
        assert command.all_down(10) is not None
        return run, code, command.output()
    finally:
        command.end()


def same(run: Run, unbroken: Run) -> None:
    assert facts(run) == facts(unbroken)
    assert weights(run) == weights(unbroken)
    assert sorted(p.name for p in run.checkpoints.glob("step-*")) == sorted(
        p.name for p in unbroken.checkpoints.glob("step-*"))
    assert not list((run.home / "memory").rglob("*.safetensors")), "the copies are freed"


def test_a_rank_lost_in_any_phase_is_replaced_and_nothing_is_lost(
    commands: Commands, unbroken: Run, tmp_path: Path
) -> None:
    moments = [
        moment(1, 0, "start", operation="communicator"),  # before anything was trained
        moment(1, 1, "forward", scope="step"), moment(0, 2, "backward", scope="step"),
        moment(2, 4, "reduce", scope="step", operation="gradients"), moment(3, 5, "evaluate", scope="evaluate"),
        moment(3, 6, "save", scope="save", operation="checkpoint"), moment(2, 7, "optimizer", scope="step"),
        moment(0, 9, "save", scope="save", operation="copy"), moment(0, 11, "forward", scope="step"),
        moment(3, 11, "forward", scope="step"),  # two at once, rank 0 among them
        moment(1, 0, "start", scope="start", operation="communicator", after=8),  # and another while they come back
        moment(2, 13, "forward", scope="step", kind="stop"),
        moment(1, 14, "data", scope="step", kind="bug"),
    ]
    run, code, output = broken(commands, tmp_path, moments)
    assert code == 0, output[-6000:]
    assert struck(tmp_path / "hook") == len(moments), output[-3000:]
    same(run, unbroken)
    events = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    recoveries = [event for event in events if event["event"] == "recovery"]
    assert len(recoveries) >= 10 and all(event["repeated"] <= 1 for event in recoveries), recoveries
    assert "made no progress" in output and "failed alone: KeyError" in output
    assert not [event for event in events if event["event"] == "failed" and "PeerLost" in event.get("message", "")]


def test_a_rank_killed_for_lack_of_memory_is_replaced(commands: Commands, unbroken: Run, tmp_path: Path) -> None:
    """By the kernel, in each of these phases."""
    phases = ((1, 1, "forward", ""), (0, 2, "backward", ""), (2, 4, "reduce", "gradients"), (3, 5, "evaluate", ""),
              (3, 6, "save", "checkpoint"), (2, 8, "optimizer", ""), (0, 9, "save", "copy"))
    with little_memory(64 << 20) as group:
        moments = [moment(rank, step, phase, operation=operation, kind="memory", folder=str(group))
                   for rank, step, phase, operation in phases]
        moments.append(moment(1, 0, "start", scope="start", operation="communicator", kind="memory", folder=str(group),
                              after=3))
        run, code, output = broken(commands, tmp_path, moments)
        assert code == 0, output[-6000:]
        assert output.count("by SIGKILL (the kernel of ") >= len(moments) - 1, output[-3000:]
        assert struck(tmp_path / "hook") == killed(group) == len(moments), output[-3000:]
    same(run, unbroken)


@pytest.mark.parametrize("damaged", [False, True])
def test_where_memory_is_lost_too_the_next_start_resumes_from_the_disk(
    commands: Commands, unbroken: Run, tmp_path: Path, damaged: bool
) -> None:
    """All processes are killed at once, and the memory is empty afterwards: power was off."""
    disk = tmp_path / "disk"
    disk.mkdir()
    sets = (f'checkpoint.disk_folder="{disk}"', "checkpoint.disk_interval=3", "checkpoint.save_interval=50")
    _, code, output = broken(commands, tmp_path, [moment(2, 11, "forward", scope="step", kind="power")], *sets)
    assert code == -9 and struck(tmp_path / "hook") == 1, output[-4000:]
    shutil.rmtree(tmp_path / "memory")
    if damaged:
        newest = max(disk.rglob("rank-00002.json"), key=lambda path: path.stat().st_mtime_ns)
        with open(newest.with_suffix(".safetensors"), "r+b") as stream:
            stream.seek(-5, 2)
            stream.write(b"x")
    run, code, output = broken(commands, tmp_path, [], *sets)
    assert code == 0, output[-4000:]
    assert re.search(rf"resumed from {disk}/\S*/copy-[01] at step {6 if damaged else 9},", output), output[-4000:]
    assert bool(re.search(rf"{disk}/\S*/rank-00002.safetensors: block \d+ .* is not what was copied: the disk is "
                          "faulty", output)) == damaged, output[-4000:]
    assert facts(run) == facts(unbroken) and weights(run) == weights(unbroken)
    assert not list(disk.rglob("rank-*")) and not list((tmp_path / "memory").rglob("rank-*")), "the copies are freed"


def test_the_watch_is_lost_too(commands: Commands, unbroken: Run, tmp_path: Path) -> None:
    """In training, then while ranks come back; what hangs after that is named by the next one."""
    moments = [
        moment(1, 3, "forward", scope="step", kind="hub"), moment(2, 5, "forward", scope="step"),
        moment(0, 0, "start", scope="start", operation="communicator", kind="hub", after=1),
        moment(3, 9, "forward", scope="step", kind="stop", after=2),
    ]
    run, code, output = broken(commands, tmp_path, moments)
    assert code == 0 and struck(tmp_path / "hook") == 4, output[-6000:]
    assert "hung" in output, output[-6000:]
    same(run, unbroken)


@pytest.mark.parametrize("kind", ["flip-copy", "tear-list"])
def test_a_damaged_copy_is_named_and_the_one_before_it_is_used(
    commands: Commands, unbroken: Run, tmp_path: Path, kind: str
) -> None:
    run, code, output = broken(commands, tmp_path, [moment(2, 8, "forward", scope="step", kind=kind)])
    assert code == 0, output[-4000:]
    assert re.search(r"rank-00002\.(safetensors: block 1 .* is not what was copied|json is not what was written)",
                     output), output[-4000:]
    assert re.search(r"resumed from \S*/memory/\S*/copy-[01] at step 7,", output), output[-4000:]
    same(run, unbroken)


def test_a_rank_whose_state_is_damaged_is_replaced_and_the_damage_is_in_no_copy(
    commands: Commands, unbroken: Run, tmp_path: Path
) -> None:
    run, code, output = broken(commands, tmp_path, [moment(2, 8, "", kind="flip-state")])
    assert code == 0 and struck(tmp_path / "hook") == 1, output[-4000:]
    assert "rank 2 failed alone: rank 2 on" in output and "bit 12" in output, output[-4000:]
    same(run, unbroken)


def test_without_copies_the_newest_checkpoint_is_used(commands: Commands, unbroken: Run, tmp_path: Path) -> None:
    run, code, output = broken(commands, tmp_path, [moment(1, 9, "forward", scope="step")],
                               "checkpoint.memory_interval=0")
    assert code == 0, output[-4000:]
    assert "/checkpoints/step-00000006 at step 6," in output
    same(run, unbroken)


@pytest.mark.parametrize("interval", [0, 1])
def test_what_the_run_began_from_is_not_forgotten(
    commands: Commands, unbroken: Run, tmp_path: Path, interval: int
) -> None:
    """Lost before there is a copy: it begins there again, not at step 0."""
    begun = unbroken.checkpoints / "step-00000006"
    moments = [moment(1, 6, "forward"), moment(3, 9, "forward", scope="step", after=0)]
    run, code, output = broken(commands, tmp_path, moments, f"checkpoint.memory_interval={interval}",
                               "checkpoint.save_interval=50", f'checkpoint.resume="{begun}"')
    assert code == 0 and struck(tmp_path / "hook") == 2, output[-4000:]
    assert output.count(f"resumed from {begun} at step 6,") == (3 if not interval else 2), output
    assert {k: v for k, v in facts(run).items() if k > 0} == {k: v for k, v in facts(unbroken).items() if k > 6}


def test_a_fault_that_comes_back_ends_the_run(commands: Commands, tmp_path: Path) -> None:
    moments = [moment(1, 3, "forward", scope=scope) for scope in ("step", "start", "start", "start", "start")]
    _, code, output = broken(commands, tmp_path, moments)
    assert code == 3, output[-4000:]
    assert "the 4th loss since a copy or checkpoint of step 3 was the newest" in output
    assert struck(tmp_path / "hook") == 4


def test_an_error_of_all_ranks_is_not_tried_again(commands: Commands, tmp_path: Path) -> None:
    _, code, output = broken(commands, tmp_path, [], "data.synthetic=false", 'data.train=["/nowhere/x"]')
    assert code == 4 and output.count("error:") == 1 and "recovery" not in output, output[-3000:]


def test_it_needs_an_agent(commands: Commands, tmp_path: Path) -> None:
    run = Run(tmp_path, "alone", Layout(), 'launch.when_lost="replace"', "checkpoint.memory_interval=1", steps=1)
    words = run.command()
    del words[words.index("--nproc"):words.index("--nproc") + 2]
    code, output = commands.run(*words)
    assert code == 3 and "needs an agent" in output, output
    shutil.rmtree(tmp_path / "runs", ignore_errors=True)
