"""Two jobs, and a job array, in one run folder, on a real SLURM: one trains, the others say why they do not."""

from __future__ import annotations

import sys

import pytest
from jobs import ROOT, losses, settings, steps, train_here
from test_launch import SHORT, Runs, runs  # noqa: F401 - runs is a fixture

from megatron_port.run.lease import newest_epoch, read_holder

pytestmark = pytest.mark.slurm

STATES = """
import sys
from megatron_port.run.launchers import job_state, one_task_at_a_time
job = sys.argv[1]
print(job_state(job), job_state(job, job + ".0"), repr(job_state(job, job + ".7")), repr(job_state("999999")))
"""


def errors_in(log: str) -> list[str]:
    return [line for line in log.splitlines() if line.startswith("error:")]


def test_a_second_job_is_refused_and_the_first_goes_on(runs: Runs) -> None:  # noqa: F811
    change = settings(training__steps=100000, **SHORT)
    first = runs.submit(["--nodes=1", "--ntasks-per-node=1"], change)
    runs.wait_for_step(first, 10)
    asked = runs.cluster.on_node("n4", ["env", f"PYTHONPATH={ROOT}", sys.executable, "-c", STATES, str(first)])
    assert asked.stdout.split() == ["RUNNING", "RUNNING", "''", "''"], asked.stdout
    holder, _ = read_holder(runs.run_folder, 1)
    assert (holder.job, holder.step, holder.host) == (str(first), f"{first}.0", "n1"), holder

    second = runs.submit(["--nodes=1", "--ntasks-per-node=1", "--open-mode=append"], change)
    record = runs.wait(second, "FAILED")
    assert record["ExitCode"] == "2:0" and record["Restarts"] == "0", record
    said = errors_in(runs.log())
    assert len(said) == 1 and f"attempt {first}.0 (SLURM job {first}) on n1" in said[0], runs.log()
    assert f"squeue says that job {first} is RUNNING" in said[0] and f"scancel {first}" in said[0]
    attempts = (runs.run_folder / "attempts.jsonl").read_text()
    assert f'"{second}.0"' not in attempts and f'"{first}.0"' in attempts
    done = steps(runs.run_folder)
    runs.wait_for_step(first, done + 10)
    runs.cluster.run(["scancel", str(first)])
    runs.wait(first, "CANCELLED")
    found = losses(runs.run_folder)
    assert len(found) > done and newest_epoch(runs.run_folder) == 1


@pytest.mark.slow
def test_tasks_of_a_job_array(runs: Runs) -> None:  # noqa: F811
    """At once in one folder: each is refused, before its ranks. One after another: each resumes the one before."""
    change = settings(training__steps=6, **SHORT, batch__micro_batch_size=3)
    options = ["--nodes=1", "--ntasks-per-node=1", "--open-mode=append"]
    job = runs.submit([*options, "--array=1-2"], change)
    runs.cluster.wait_for(lambda: len(errors_in(runs.log())) == 2, 300, "two refusals")
    log = runs.log()
    for task in (1, 2):
        assert f"task {task} of the job array {job} would share" in log and "-$SLURM_ARRAY_TASK_ID" in log, log
    assert not steps(runs.run_folder)

    runs.submit([*options, "--array=1-2%1"], change)
    runs.cluster.wait_for(lambda: not runs.cluster.run(["squeue", "--noheader"]).stdout.strip(), 300, "both tasks")
    assert len(errors_in(runs.log())) == 2 and newest_epoch(runs.run_folder) == 2, runs.log()
    assert f"resumed from {runs.run_folder}/checkpoints/step-00000006 at step 6" in runs.log(), runs.log()
    assert losses(runs.run_folder) == train_here(1, *change)
