"""A rank is killed: nothing committed is lost, nobody stays behind, and the losses are those of the unbroken run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import kills
import pytest
from commands import Commands
from small_runs import Layout, Run


def test_killed_ranks(commands: Commands, tmp_path: Path) -> None:
    """Some of ``make soak``'s hundred."""
    outcomes = kills.strike_all(commands, tmp_path, Layout(tp=2), range(1000, 1002), steps=14)
    assert len(outcomes) == 2
    assert all(o.ok for o in outcomes), "\n".join(str(o) for o in outcomes if not o.ok)


def test_killed_before_the_ranks_have_met(commands: Commands, tmp_path: Path) -> None:
    """The others would wait for it until the rendezvous' deadline, minutes later."""
    command = commands.start(*Run(tmp_path, "run", Layout(dp=2), *kills.SETS, steps=2000).command())
    try:
        while len(found := command.ranks(2)) < 2:
            time.sleep(0.001)
        os.kill(found[1], signal.SIGKILL)
        # Alone it takes 8 s, after which the launcher kills what no signal ended; the load of the suite adds some.
        assert command.all_down(3 * kills.DOWN_S) is not None, command.output()
        assert command.wait(5) != 0 and "rank 1 was killed by SIGKILL" in command.output()
    finally:
        command.end()


@pytest.mark.parametrize("victim", ["the launcher", "every rank"])
def test_killed_otherwise(commands: Commands, tmp_path: Path, victim: str) -> None:
    """The parent of the ranks, or all of them at once, in the middle of a run."""
    run = Run(tmp_path, "run", Layout(dp=2), *kills.SETS, steps=2000)
    command = commands.start(*run.command())
    try:
        while len(run.steps_done()) < 3 or run.committed() < 2:  # saves are asynchronous
            assert command.poll() is None and time.monotonic() < command.started + 90, command.output()
            time.sleep(0.01)
        for pid in [command.pid] if victim == "the launcher" else command.ranks(2):
            os.kill(pid, signal.SIGKILL)
        assert command.all_down(kills.DOWN_S) is not None, command.output()
        assert command.wait(5) != 0
        assert run.committed() >= 2
    finally:
        command.end()


def test_the_judge_sees_a_lost_step(commands: Commands, tmp_path: Path) -> None:
    """A loss that differs in its last bit, and a resume from an older step, are faults."""
    kill = kills.Kill(seed=1, victim=0, in_save=False, nth_save=1, fraction=0.0)
    whole = kills.Reference({1: (1.0, 1.0, 0.1, 4, 128)}, 0.1, 1.0, 0.5, run=None)  # type: ignore[arg-type]
    chain = kills.Chain(commands, tmp_path, Layout(), whole, 1, 4)
    chain.run.folder.mkdir(parents=True)
    (chain.run.folder / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 1.0000000000000002, "grad_norm": 1.0, "learning_rate": 0.1, "samples": 4, "tokens": 128}\n'
    )
    command = commands.start("--version")
    command.wait(10)
    outcome = chain._judge(command, kill, in_save=False, moment=0.1, down=11.0)
    chain._resolve("resumed from x/step-00000002 at step 2, 8 samples\n")
    assert outcome.resumed == 2 and not outcome.ok
    assert [word for word in ("11.0 s until", "exit 0", "not named", "step 1: (1.0000000000000002")
            if not any(word in fault for fault in outcome.faults)] == []
