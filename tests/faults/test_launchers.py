"""Processes that mpirun or a Kubernetes operator starts: one run of all of them, or none; never a run each."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from commands import Commands
from small_runs import Layout, Run, trajectory

STEPS = 4
SETS = ("checkpoint.save_interval=0", "checkpoint.save_final=false")


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def openmpi(rank: int, port: str) -> dict[str, str]:
    return {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_RANK": str(rank), "PMIX_NAMESPACE": port}


def pytorchjob(rank: int, port: str) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def launched(run: Run) -> list[str]:
    """The command of one rank that something else starts."""
    command = run.command()
    at = command.index("--nproc")
    return command[:at] + command[at + 2 :]


@pytest.mark.parametrize("variables", [openmpi, pytorchjob])
def test_two_processes_are_one_run(commands: Commands, tmp_path: Path, variables) -> None:
    whole = Run(tmp_path / "whole", "whole", Layout(dp=2), *SETS, steps=STEPS)
    code, output = commands.run(*whole.command())
    assert code == 0, output
    run, port = Run(tmp_path / "run", "run", Layout(dp=2), *SETS, steps=STEPS), free_port()
    # As many replicas as there are ranks: a rank that took itself for the only one would train too.
    words = [w.replace("data_parallel_size=2", "data_parallel_size=0") for w in launched(run)]
    ranks = [commands.start(*words, env=variables(rank, port)) for rank in range(2)]
    codes = [rank.wait(60) for rank in ranks]
    logs = [rank.output() for rank in ranks]
    assert codes == [0, 0], logs
    assert "2 ranks met" in logs[0] and "step" not in logs[1], logs
    assert trajectory(run.steps_done()) == trajectory(whole.steps_done()) and len(run.steps_done()) == STEPS


def test_a_launcher_that_says_too_little_starts_nothing(commands: Commands, tmp_path: Path) -> None:
    run = Run(tmp_path, "run", Layout(), *SETS, steps=STEPS)
    ranks = [commands.start(*launched(run), env={"PMIX_RANK": str(rank)}) for rank in range(2)]
    assert [rank.wait(60) for rank in ranks] == [3, 3]
    said = [rank.output().splitlines() for rank in ranks]
    assert said[0][-1].startswith("error: PMIX_RANK=0 is set by a PMIx launcher") and said[1] == [], said
    assert not run.folder.exists()
