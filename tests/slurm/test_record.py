"""The launch record on a real SLURM: what is queued does not change, is not queued twice, and stays cancelled."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator

import pytest
from cluster import Cluster, start_cluster, why_not
from jobs import ROOT, environment, losses, metrics, settings, train_here
from test_launch import IMPATIENT, SHORT, Runs, resumed_bit_for_bit, runs  # noqa: F401 - runs is a fixture

pytestmark = pytest.mark.slurm

RUN = 'extends = ["runs/quickstart", "clusters/slurm"]\n[cluster]\nnodes = {nodes}\ngpus_per_node = {tasks}\n'


class Login:
    """`megatron-port launch` on the login host, in a test's folder."""

    def __init__(self, runs: Runs, *, nodes: int = 1, tasks: int = 1, **change: object) -> None:  # noqa: F811
        self.runs = runs
        self.file = runs.folder / "run.toml"
        self.file.write_text(RUN.format(nodes=nodes, tasks=tasks))
        place = ["--set", "name=job", "--set", f"output_dir={runs.folder}/runs"]
        self.arguments = [*settings(**{**SHORT, **change}), *place]

    def __call__(self, *words: str, code: int = 0, **env: str) -> str:
        done = self.runs.cluster.run(
            [sys.executable, "-m", "megatron_port", "launch", *words], check=False, cwd=self.runs.folder,
            env=environment(PYTHONPATH=str(ROOT), **env),
        )
        assert done.returncode == code, (words, done.stdout, done.stderr)
        return done.stdout + done.stderr

    def submit(self, *options: str, code: int = 0, after: str = "", env: dict[str, str] | None = None) -> str:
        follow = ["--after", after] if after else []
        log = f"--output={self.runs.folder}/log.out"
        return self("submit", "run.toml", *self.arguments, *follow, "--", log, *options, code=code, **(env or {}))

    def job(self, *options: str, **env: str) -> int:
        found = re.search(r"^job (\d+), ", self.submit(*options, env=env))
        assert found
        return int(found[1])


def test_what_is_queued_does_not_change_and_usr1_saves_requeues_and_resumes(runs: Runs) -> None:  # noqa: F811
    """The second submission is refused, the run file is edited, and a warning of the time limit comes."""
    login = Login(runs, nodes=2, training__steps=60)
    job = login.job("--hold")
    assert f"was submitted already: job {job} is PENDING" in login.submit(code=2)
    assert "PENDING (JobHeldUser)" in login("status")
    login.file.write_text("seed = nonsense")
    runs.cluster.run(["scontrol", "release", str(job)])
    runs.wait_for_step(job, 10)
    runs.cluster.run(["scancel", "--batch", "--signal=USR1", str(job)])
    resumed_bit_for_bit(runs, job, settings(**SHORT, training__steps=60), nodes=2)
    [row] = json.loads(login("status", "runs", "--json"))
    assert (row["state"], row["step"], row["steps"], row["attempts"]) == ("finished", 60, 60, 2), row
    assert row["node_hours"] > 0 and "finished at step 60" in login("list", "runs/job")
    assert "master" in login("logs", "runs/job", "-n", "0")


@pytest.mark.slow
def test_a_cancelled_run_stays_cancelled_while_it_is_chained(runs: Runs) -> None:  # noqa: F811
    login = Login(runs, training__steps=100000, launch__when_stopped='"chain"')
    job = login.job()
    runs.wait_for_step(job, 5)
    runs.cluster.run(["scancel", "--batch", "--signal=USR1", str(job)])
    said = login("cancel", "runs/job")  # of this job, or of the next one where it has saved and chained that already
    assert re.search(rf"^job ({job}|{job + 1}) \(", said), said
    runs.cluster.wait_for(lambda: not runs.cluster.run(["squeue", "--noheader"]).stdout.strip(), 60, "empty queue")
    time.sleep(3)
    assert not runs.cluster.run(["squeue", "--noheader"]).stdout.strip()
    [row] = json.loads(login("status", "runs/job", "--json"))
    assert row["state"] == "cancelled"
    runs.cluster.run(["scontrol", "requeue", str(job)], check=False)  # an administrator's mistake
    runs.cluster.wait_for(lambda: not runs.cluster.run(["squeue", "--noheader"]).stdout.strip(), 60, "empty queue")
    done = len(metrics(runs.run_folder))
    login.arguments += ["--set", f"training.steps={done + 5}"]
    runs.wait(login.job(), "COMPLETED")
    assert len(losses(runs.run_folder)) == done + 5


@pytest.fixture
def lossy() -> Iterator[Cluster]:
    """Three nodes whose loss is noticed in seconds."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with start_cluster(3, options=IMPATIENT) as cluster:
        yield cluster


@pytest.mark.slow
def test_a_chain_after_the_loss_of_a_node_asks_for_all_nodes(lossy: Cluster) -> None:
    runs = Runs(lossy, "chain-loss")  # noqa: F811
    login = Login(runs, nodes=2, training__steps=60, launch__when_failed='"chain"', checkpoint__save_interval=20)
    job = login.job("--no-requeue", "--no-kill")
    runs.wait_for_step(job, 25)
    runs.cluster.crash_node("n2")
    runs.cluster.wait_for(lambda: f"job {job + 1} follows" in runs.log(), 120, "the next job")
    asked = runs.cluster.job(job + 1)
    assert asked["NumNodes"].partition("-")[0] == "2" and asked["Command"].startswith(f"{runs.run_folder}/launch/0001/")
    runs.wait(job + 1, "COMPLETED", timeout=300)
    whole = settings(**SHORT, training__steps=60, checkpoint__save_interval=20)
    assert losses(runs.run_folder) == train_here(2, *whole)


@pytest.mark.slow
def test_a_sweep_is_an_array_with_a_folder_for_each_task(runs: Runs) -> None:  # noqa: F811
    login = Login(runs, training__steps=3)
    words = ["sweep", "run.toml", *login.arguments, "--vary", "optimizer.lr=1e-3,1e-2", "--vary", "seed=1,2"]
    assert "all 4" not in login(*words, "--dry-run") and not (runs.folder / "runs").exists()
    said = login(*words, "--at-once", "2", "--", f"--output={runs.folder}/%A_%a.out")
    found = re.search(r"^job array (\d+), 4 tasks", said, re.MULTILINE)
    assert found
    written = login.file.read_text()
    login.file.write_text("nonsense")
    runs.cluster.wait_for(lambda: not runs.cluster.run(["squeue", "--noheader"]).stdout.strip(), 300, "all tasks")
    login.file.write_text(written)
    for index, (lr, seed) in enumerate([(1e-3, 1), (1e-3, 2), (1e-2, 1), (1e-2, 2)]):
        folder = runs.folder / "runs" / f"job-{index:03d}"
        log = (runs.folder / f"{found[1]}_{index}.out").read_text()
        assert losses(folder) == train_here(1, *settings(**SHORT, training__steps=3, optimizer__lr=lr, seed=seed)), log
    assert login("status").count("finished") == 4
    assert "are there already" in login(*words, code=2)


@pytest.mark.slow
def test_sbatch_n_is_honoured_and_a_bad_one_is_refused(runs: Runs) -> None:  # noqa: F811
    change = settings(**{**SHORT, "training__steps": 3, "batch__global_batch_size": 8})
    job = runs.submit(["-N", "2", "-n", "4"], change)
    runs.wait(job, "COMPLETED")
    assert "2 nodes × 2 tasks" in runs.log() and "dp 4" in runs.log(), runs.log()
    assert losses(runs.run_folder) == train_here(4, *change)
    bad = runs.submit(["-N", "2", "-n", "3", "--open-mode=append"], change)
    record = runs.wait(bad, "FAILED")
    assert record["Restarts"] == "0" and "3 tasks (-n) on 2 nodes (-N)" in runs.log(), runs.log()
