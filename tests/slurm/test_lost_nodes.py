"""Runs that lose ranks and nodes on a real SLURM, and go on in the same job; losses are those of one machine."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest
from cluster import Cluster
from jobs import ROOT, environment, losses, settings, train_here
from test_launch import Runs

pytestmark = pytest.mark.slurm

CHANGE = {"training__steps": 60, "layout__tensor_parallel_size": 2, "batch__global_batch_size": 12}
KEPT = ["--set", "launch.when_lost=replace", "--set", "checkpoint.memory_interval=1", "--set", "watch.hang_seconds=4"]


@pytest.fixture
def runs(cluster: Cluster, request: pytest.FixtureRequest) -> Runs:
    return Runs(cluster, request.node.name.replace("[", "-").rstrip("]"))


def submit(runs: Runs, nodes: int, *more: str, spares: int = 0, **change: object) -> int:
    """Two ranks on each node."""
    return runs.submit(["--no-kill", f"--nodes={nodes}", "--ntasks-per-node=2", "--cpus-per-task=1"],
                       [*settings(**{**CHANGE, **change}), *KEPT, *more], env={"SPARE_NODES": str(spares)})


def signal_a_rank(cluster: Cluster, node: str, number: int) -> None:
    for pid, _ in cluster.processes(node):
        if Path(f"/proc/{pid}/comm").read_text().startswith("mp-rank-"):
            return os.kill(pid, number)
    raise AssertionError(f"no rank on {node}")


def same(runs: Runs, *, exactly: int = 60) -> None:
    """Bit for bit as on one machine as long as the layout was the one asked for, nearly then."""
    found, expected = losses(runs.run_folder), train_here(6, *settings(**CHANGE))
    assert found[:exactly] == expected[:exactly] and found == pytest.approx(expected, abs=1e-5)
    assert len(found) == len(expected)


def test_a_hung_rank_a_lost_node_and_another_without_a_spare(runs: Runs) -> None:
    """A rank is replaced on its node; a node by the spare one; then the run is split over the two that are left."""
    job = submit(runs, 4, "--set", "layout.elastic=true", spares=1)
    runs.wait_for_step(job, 8)
    signal_a_rank(runs.cluster, "n2", signal.SIGSTOP)
    runs.wait_for_step(job, 20)
    runs.cluster.kill_task("n2", "megatron_port train")
    runs.wait_for_step(job, 34)
    runs.cluster.kill_task("n3", "megatron_port train")
    runs.wait(job, "COMPLETED")
    log = runs.log()
    same(runs, exactly=33)
    # The rank that shares its tensors may be in the same operation, and then be taken for hung as well.
    assert re.search(r"recovery 1: ranks? 2(, 3)? hung; ranks that keep their processes: [54], that are started again: "
                     r"[12]; nodes: n1, n2, n3; spare nodes left: 1", log), log
    assert "recovery 2: node n2 is lost" in log and "nodes: n1, n4, n3; spare nodes left: 0" in log, log
    assert "recovery 3: node n3 is lost" in log and "elastic: 4 ranks came" in log, log
    assert log.count("from the nodes' memory") == 3 and "restart 1" not in log, log
    runs.no_rank_left()
    assert not [name for name in ("n1", "n4") if copies(runs, name)], "the copies are freed"


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["crash", "cut"])
def test_a_node_that_answers_no_more(runs: Runs, fault: str) -> None:
    """Nothing closes its connections: power is off, or the cable is out. The job has a spare node, and goes on."""
    job = submit(runs, 4, spares=1)
    runs.wait_for_step(job, 20)
    assert "rank-00002.json" in copies(runs, "n2") and "rank-00002.json" in copies(runs, "n3")
    runs.cluster.crash_node("n2") if fault == "crash" else runs.cluster.cut_link("n2")
    runs.wait(job, "COMPLETED")
    same(runs)
    log = runs.log()
    assert "node n2 is lost: nothing was heard of it for 8 s" in log and "nodes: n1, n4, n3" in log, log
    assert "keep their processes: 4" in log and "restart 1" not in log, log
    if fault == "cut":  # the node lives, and the run does not need its copies any more
        runs.cluster.wait_for(lambda: not copies(runs, "n2"), 30, "the end of the copies")


def copies(runs: Runs, node: str) -> str:
    """Copies of the run's state that are in a node's memory."""
    name = hashlib.sha256(str(runs.run_folder).encode()).hexdigest()[:16]
    found = runs.cluster.on_node(node, ["sh", "-c", f"find /dev/shm -path '*/{name}*/rank-*'"]).stdout
    assert isinstance(found, str)
    return found


@pytest.mark.slow
def test_nodes_that_hold_one_anothers_copies_lost_at_once(runs: Runs) -> None:
    """The next start takes the newest checkpoint. SLURM starts the job on other nodes."""
    job = submit(runs, 3, "--set", "checkpoint.save_interval=8")
    runs.wait_for_step(job, 20)
    runs.cluster.crash_node("n2")
    runs.cluster.crash_node("n3")
    for name in ("n2", "n3"):
        runs.cluster.restore_node(name, 120)
    runs.wait(job, "COMPLETED", timeout=500)
    same(runs)
    log = runs.log()
    assert "restart 1" in log and "resumed from" in log and "/checkpoints/step-00000016 at step 16" in log, log


@pytest.mark.slow
def test_copies_that_cannot_be_saved_wait_for_the_next_start(runs: Runs) -> None:
    """The folder of the checkpoints refuses them: the job is queued again, and resumes from memory once it does not."""
    job = submit(runs, 4, spares=1)
    runs.wait_for_step(job, 20)
    folder = runs.run_folder / "checkpoints"
    aside = folder.rename(runs.folder / "aside") if folder.exists() else None
    folder.write_text("no folder")
    runs.cluster.kill_task("n2", "megatron_port train")
    runs.cluster.wait_for(lambda: "restart 1" in runs.log(), 120, "another start")
    folder.unlink()
    if aside is not None:
        aside.rename(folder)
    runs.wait(job, "COMPLETED")
    same(runs)
    log = runs.log()
    assert "the run would go back to its beginning" in log and "it resumes at step" in log, log
    assert "from the nodes' memory" in log, log


@pytest.mark.slow
@pytest.mark.parametrize("who", ["agent", "signal"])
def test_the_next_start_of_the_job_continues(runs: Runs, who: str) -> None:
    """Where the agent is killed the copies stay in the nodes' memory; before a time limit the run saves."""
    job = submit(runs, 3)
    runs.wait_for_step(job, 20)
    if who == "agent":
        runs.cluster.kill_task("n1", "megatron_port train")
    else:
        runs.cluster.run(["scancel", "--signal=USR1", "--batch", str(job)])
    runs.wait(job, "COMPLETED")
    same(runs)
    log = runs.log()
    assert ("from the nodes' memory" if who == "agent" else "stopped by SIGUSR1") in log, log
    assert "restart 1" in log, log


@pytest.mark.slow
def test_a_slow_node_gives_its_place_to_the_spare_one(runs: Runs) -> None:
    job = submit(runs, 4, "--set", "watch.replace_percent=100", "--set", "watch.straggler_steps=5", "--set",
                 "watch.hang_seconds=60", "--set", "watch.straggler_windows=2", spares=1, training__steps=400)
    runs.wait_for_step(job, 20)
    runs.cluster.throttle("n2", 0.1)
    runs.cluster.wait_for(lambda: "recovery 1" in runs.log(), 300, "a recovery")
    runs.cluster.unthrottle("n2")
    runs.wait(job, "COMPLETED")
    found, expected = losses(runs.run_folder), train_here(6, *settings(**{**CHANGE, "training__steps": 400}))
    assert found == expected
    log = runs.log()
    assert "on n2 takes " in log and "times as long as its peers; ranks that keep" in log, log
    assert "nodes: n1, n4, n3; spare nodes left: 0" in log and "recovery 2" not in log, log


def by_hand(runs: Runs, nodes: int, command: str) -> int:
    """A command once on each node, without the launch scripts; the stdout of each in a file."""
    srun = ["srun", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--ntasks-per-node=1", "--open-mode=append",
            f"--error={runs.folder}/log.out", f"--output={runs.folder}/task-%t.out", "sh", "-c", command]
    return runs.cluster.sbatch("--no-kill", f"--nodes={nodes}", "--ntasks-per-node=1",
                               f"--output={runs.folder}/job.out", f"--wrap={shlex.join(srun)}",
                               env=environment(PYTHONPATH=str(ROOT)), cwd=runs.folder)


@pytest.mark.slow
def test_a_rank_is_replaced_where_torchrun_starts_the_nodes(runs: Runs) -> None:
    """Its agent ends the job where a node is lost; a rank is nothing that it knows of."""
    words = ["-m", "--", "megatron_port", "train", "runs/quickstart", "--nproc", "2", *settings(**CHANGE), *KEPT,
             "--set", "name=job", "--set", f"output_dir={runs.folder}/runs"]
    job = by_hand(runs, 3, f"exec {sys.executable} -m torch.distributed.run --nnodes=3 --nproc-per-node=1 --node-rank="
                  f"$SLURM_NODEID --master-addr=n1 --master-port=29511 {shlex.join(words)}")
    runs.wait_for_step(job, 12)
    signal_a_rank(runs.cluster, "n2", signal.SIGKILL)
    runs.wait(job, "COMPLETED")
    same(runs)
    assert re.search(r"recovery 1: rank 2 was killed by SIGKILL; ranks that keep their processes: 5, that are started "
                     "again: 1", runs.log()), runs.log()


@pytest.mark.slow
def test_a_drill_over_several_nodes(runs: Runs) -> None:
    """Each node has a process of it; a rank is killed on the second, then the third is lost."""
    words = [sys.executable, "-m", "megatron_port", "chaos", "runs/quickstart", "--nproc", "2", *settings(**CHANGE),
             *KEPT, "--set", "name=job", "--set", f"output_dir={runs.folder}/runs", "--set", "launch.spare_nodes=1",
             "--schedule", "3 kill 3; 14 node 4", "--json"]
    job = by_hand(runs, 4, shlex.join(words))
    runs.cluster.wait(job, timeout=300)
    same(runs)
    done, log = json.loads((runs.folder / "task-0.out").read_text()), runs.log()
    assert [(f["fault"], f["rank"]) for f in done["faults"]] == [("kill", 3), ("node", 4)], log
    assert done["exit_code"] == 0 and done["recoveries"] == 2 and done["steps"] == 60, log
    assert all(f["recovered_seconds"] and f["repeated"] <= 2 for f in done["faults"]), done
    assert "nodes: n1, n2, n4; spare nodes left: 0" in log and not (runs.folder / "task-1.out").read_text(), log
