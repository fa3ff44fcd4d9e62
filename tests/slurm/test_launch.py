"""The job scripts on a real SLURM of four nodes: training, time limits, failures.

Losses are compared with unbroken runs.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, Options, parse_job, start_cluster, why_not
from jobs import ROOT, environment, losses, metrics, settings, steps, train_here

from megatron_port.core.config.machine import ClusterConfig

pytestmark = pytest.mark.slurm

LOCAL_DISK = ClusterConfig().local_disk
SHORT = {"model__num_layers": 1, "batch__global_batch_size": 6}
"""Two or three micro-batches on each of two or three ranks: many steps a second. A rank more takes five seconds of a
core, to import torch."""


class Runs:
    """Jobs of one test, in a folder that every node sees."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.folder = cluster, cluster.shared / name
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self.run_folder = self.folder / "runs" / "job"

    def submit(self, options: list[str], arguments: list[str], *, script: str = "launch/slurm.sh",
               run: str | None = "runs/quickstart", env: dict[str, str] | None = None) -> int:
        """sbatch ``script``, in this folder; the log is ``log.out`` there."""
        return self.cluster.sbatch(
            f"--output={self.folder}/log.out", *options, str(ROOT / script), *([run] if run else []), *arguments,
            "--set", "name=job", "--set", f"output_dir={self.folder}/runs",
            env=environment(**(env or {})), cwd=self.folder,
        )

    def log(self) -> str:
        path = self.folder / "log.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, job: int, state: str, timeout: float = 300) -> dict[str, str]:
        record = self.cluster.wait(job, timeout=timeout)
        assert record["JobState"] == state, f"{record}\n{self.log()}"
        return record

    def wait_for_step(self, job: int, step: int, timeout: float = 300) -> None:
        """Return when the run has done ``step`` steps."""
        deadline = time.monotonic() + timeout
        while steps(self.run_folder) < step:
            state = self.cluster.job(job)["JobState"]
            alive = state in ("PENDING", "CONFIGURING", "RUNNING") and time.monotonic() < deadline
            assert alive, f"job {job} is {state} and has not reached step {step}\n{self.log()}"
            time.sleep(0.1)

    def no_rank_left(self) -> None:
        """No process of the package on any node."""
        left = {
            name: command for name in self.cluster.nodes for _, command in self.cluster.processes(name)
            if "megatron_port" in command
        }
        assert not left, left


@pytest.fixture
def runs(cluster: Cluster, request: pytest.FixtureRequest) -> Runs:
    return Runs(cluster, request.node.name.replace("[", "-").rstrip("]"))


def test_a_job_trains_as_one_process_does(runs: Runs) -> None:
    change = {"training__steps": 5, "batch__global_batch_size": 8}
    job = runs.submit(
        ["--nodes=4", "--ntasks-per-node=1"],
        settings(**change, engine="deepspeed", layout__zero_stage=1, layout__pipeline_parallel_size=2),
    )
    runs.wait(job, "COMPLETED")
    found = losses(runs.run_folder)
    expected = train_here(1, *settings(**change))
    assert len(found) == 5 and found == pytest.approx(expected, abs=1e-5)
    log = runs.log()
    first = runs.cluster.addresses[runs.cluster.nodes[0]]
    assert f"master {first}:" in log and f"master_addr {first} (--master-addr)" in log, log
    assert "tp 1 x pp 2 x dp 2" in log and "conflict" not in log, log


def visible_devices(cluster: Cluster, ranks: int) -> list[str]:
    """ROCR_VISIBLE_DEVICES of the ranks that run now, once there are ``ranks`` of them."""
    ranks_here = "pgrep -f '^[^ ]*python[0-9.]* -m megatron_port train'"
    show = f"for p in $({ranks_here}); do tr '\\0' '\\n' < /proc/$p/environ; done"
    found = sorted(
        line.partition("=")[2] for name in cluster.nodes
        for line in cluster.on_node(name, ["sh", "-c", show], check=False).stdout.splitlines()
        if line.startswith("ROCR_VISIBLE_DEVICES=")
    )
    return found if len(found) == ranks else []


@pytest.mark.parametrize(
    ("script", "published"),
    [("frontier_1t", "61.2 (HFU 31.96 %)"), pytest.param("frontier_22b", "73.5 (HFU 38.38 %)", marks=pytest.mark.slow),
     pytest.param("frontier_175b", "69.2 (HFU 36.14 %)", marks=pytest.mark.slow),
     pytest.param("frontier_1t_tp4", "published", marks=pytest.mark.slow)],
)
def test_a_frontier_script_runs_as_it_is_with_command_line_options(runs: Runs, script: str, published: str) -> None:
    loaded = runs.folder / "modules"
    lmod = runs.folder / "lmod" / "init" / "bash"
    lmod.parent.mkdir(parents=True)
    lmod.write_text(f'module() {{ printf "%s\\n" "$*" >> "{loaded}"; }}\n')
    job = runs.submit(
        ["--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1"],
        settings(precision__dtype="bf16", training__steps=6, layout__tensor_parallel_size=2, engine="native",
                 layout__pipeline_parallel_size=2, activations__policy="full", batch__global_batch_size=8,
                 cluster__peak_tflops=191.5),
        script=f"launch/{script}.sh", run=None,
        # The faked nodes have no topology for --gpu-bind=closest to go by.
        env={"LMOD_PKG": str(lmod.parents[1]), "SBATCH_ACCOUNT": "abc123", "SRUN_OPTIONS": "--gpu-bind=single:1"},
    )
    devices = runs.cluster.wait_for(lambda: visible_devices(runs.cluster, ranks=4), 200, "four ranks")
    runs.wait(job, "COMPLETED")
    assert devices == ["0", "0", "1", "1"], devices
    log = runs.log()
    assert "load rocm/" in loaded.read_text() and "rccl" in loaded.read_text()
    tail = [line for line in log.splitlines() if line][-2:]
    assert tail[0].startswith("TFLOP/s per GCD") and "HFU" in tail[0] and "MFU" in tail[0], log
    assert tail[1].startswith("published: hardware") and published in tail[1], log
    assert len(losses(runs.run_folder)) == 6


@pytest.mark.slow
def test_usr1_by_the_clock_of_the_time_limit(runs: Runs) -> None:
    change = settings(training__steps=1200, **SHORT)
    job = runs.submit(["--nodes=2", "--ntasks-per-node=1", "--time=1", "--signal=B:USR1@30"], change)
    resumed_bit_for_bit(runs, job, change, nodes=2)


def resumed_bit_for_bit(runs: Runs, job: int, change: list[str], nodes: int) -> None:
    """The job was queued again after a save, went on, and has the very losses of a run that nothing stopped."""
    record = runs.wait(job, "COMPLETED", timeout=400)
    log = runs.log()
    assert int(record["Restarts"]) >= 1, log
    assert "USR1 received" in log and "saved at step" in log and "resumed from" in log, log
    assert losses(runs.run_folder) == train_here(nodes, *change)


@pytest.mark.slow
def test_sigterm_alone_saves_and_the_next_job_goes_on(runs: Runs) -> None:
    change = settings(training__steps=60, **SHORT)
    job = runs.submit(["--nodes=3", "--ntasks-per-node=1"], change)
    runs.wait_for_step(job, 10)
    runs.cluster.run(["scancel", str(job)])
    runs.wait(job, "CANCELLED")
    done = steps(runs.run_folder)
    assert 10 <= done < 60 and (runs.run_folder / "checkpoints" / f"step-{done:08d}").is_dir(), runs.log()
    runs.wait(runs.submit(["--nodes=3", "--ntasks-per-node=1"], change), "COMPLETED")
    assert f"resumed from {runs.run_folder}/checkpoints/step-{done:08d}" in runs.log()
    assert losses(runs.run_folder) == train_here(3, *change)


@pytest.mark.slow
def test_a_killed_task_ends_the_job_and_is_named(runs: Runs) -> None:
    change = settings(training__steps=100000, launch__when_failed='"stop"')
    job = runs.submit(["--nodes=4", "--ntasks-per-node=1"], change)
    runs.wait_for_step(job, 5)
    victim = runs.cluster.nodes[2]
    started = time.monotonic()
    runs.cluster.kill_task(victim, "megatron_port train")
    runs.wait(job, "FAILED")
    assert time.monotonic() - started < 30
    log = runs.log()
    last = [line for line in log.splitlines() if line][-1]
    assert "first failure" in last and victim in last and "Killed" in last, log
    assert "Traceback" not in log, log
    runs.no_rank_left()


@pytest.fixture
def patient() -> Iterator[Cluster]:
    """Nodes whose SLURM gives a cancelled job as long as sites do (KillWait 30 s): time enough to queue it again."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with start_cluster(2, options=Options(kill_wait=30)) as cluster:
        yield cluster


def test_a_job_cancelled_after_its_warning_stays_cancelled(patient: Cluster) -> None:
    runs = Runs(patient, "cancelled")
    job = runs.submit(["--nodes=2", "--ntasks-per-node=1"], settings(training__steps=100000, **SHORT))
    runs.wait_for_step(job, 3)
    runs.cluster.run(["sh", "-c", f"scancel --batch --signal=USR1 {job}; sleep 0.3; scancel {job}"])
    record = runs.wait(job, "CANCELLED", timeout=60)
    # The job is cancelled from the first moment on; its script goes on for up to KillWait.
    runs.cluster.wait_for(lambda: "the job was cancelled" in runs.log(), 30, f"the script's last line in\n{runs.log()}")
    log = runs.log()
    assert record["Restarts"] == "0" and "queued again" not in log.replace("it is not queued again", ""), log
    assert "saved at step" in log, log
    done = steps(runs.run_folder)
    assert (runs.run_folder / "checkpoints" / f"step-{done:08d}").is_dir(), log


IMPATIENT = Options(kill_wait=30, slurmd_timeout=5, message_timeout=3, cred_expire=6)


@pytest.fixture
def impatient() -> Iterator[Cluster]:
    """Three nodes whose loss SLURM notices in seconds; a site's SLURM takes minutes. KillWait is the usual one, so that
    the scripts of jobs come to their end.
    """
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with start_cluster(3, options=IMPATIENT) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("fault", "length"),
    [("crash_node", 60), pytest.param("cut_link", 60, marks=pytest.mark.slow),
     pytest.param("kill_slurmd", 1500, marks=pytest.mark.slow)],  # its tasks run until SLURM misses it
)
def test_a_lost_node_ends_the_job_or_requeues_it(
    impatient: Cluster, fault: str, length: int
) -> None:
    """Two of three nodes are used, so the job can start again elsewhere at once."""
    runs = Runs(impatient, fault)
    change = settings(training__steps=length, **SHORT)
    job = runs.submit(["--nodes=2", "--ntasks-per-node=1"], [*change, "--set", "checkpoint.save_interval=20"])
    runs.wait_for_step(job, 25)
    victim = runs.cluster.nodes[1]
    getattr(runs.cluster, fault)(victim)
    runs.wait(job, "COMPLETED", timeout=400)
    log = runs.log()
    assert "resumed from" in log and victim in log, log
    assert losses(runs.run_folder) == train_here(2, *change)


def test_no_job_is_chained_beside_slurms_own_requeue(impatient: Cluster) -> None:
    """Ranks that end at once leave the script its KillWait, while SLURM has the job queued with what the loss left."""
    runs = Runs(impatient, "beside")
    python = runs.folder / "python"
    python.write_text('#!/bin/sh\ncase "$*" in *"megatron_port train"*) exec sleep 600 ;; esac\n'
                      f'exec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    job = runs.submit(["--nodes=2", "--ntasks-per-node=1"], settings(launch__when_failed='"chain"'),
                      env={"PYTHON": str(python)})
    cluster = runs.cluster
    cluster.wait_for(lambda: any("sleep 600" in line for _, line in cluster.processes("n2")), 120, "the ranks")
    cluster.crash_node("n2")
    told = re.compile(r"again by itself|follows$", re.MULTILINE)
    cluster.wait_for(lambda: told.search(runs.log()), 120, "the script's decision")
    jobs = [parse_job(text) for text in cluster.run(["scontrol", "show", "job"]).stdout.split("\n\n") if text.strip()]
    assert [(j["JobId"], j["Restarts"], j["Requeue"]) for j in jobs] == [(str(job), "1", "1")], f"{jobs}\n{runs.log()}"
    [first] = [json.loads(x) for x in (runs.run_folder / "launch" / "0001" / "jobs.jsonl").read_text().splitlines()]
    assert (first["job"], first["asked"]["NumNodes"].partition("-")[0]) == (str(job), "2")


STALE = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0"}
"""As they stay behind in a shell, whose environment sbatch hands to the job."""


LISTEN = """\
import socket, sys, time
s = socket.socket()
s.bind((sys.argv[1], int(sys.argv[2])))
s.listen()
time.sleep(600)
"""


@pytest.mark.slow
def test_a_full_disk_a_taken_port_and_a_prepared_folder_do_not_end_a_job(runs: Runs) -> None:
    """n2's disk cannot take the environment, and a spare is there; somebody listens on the job's port; another user has
    made the folder that he expects the job to unpack into.
    """
    archive = packed_environment(runs)
    change = settings(training__steps=2, model__num_layers=1)
    job = runs.submit(["--hold", "--nodes=3", "--ntasks-per-node=1"], change,
                      env={"SPARE_NODES": "1", "STAGE": str(archive)})
    port, guessed = 15000 + 31 * job % 17000, f"{LOCAL_DISK}/megatron_port-{job}"
    cluster = runs.cluster
    cluster.on_node("n2", ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/tmp"])
    try:
        prepare = f"mkdir {guessed} && echo mine > {guessed}/file && chown -R 12345 {guessed}"
        cluster.on_node("n1", ["sh", "-c", prepare])
        listen = shlex.join([sys.executable, "-c", LISTEN, cluster.addresses["n1"], str(port)])
        cluster.on_node("n1", ["sh", "-c", f"setsid {listen} > /dev/null 2>&1 &"])
        cluster.run(["scontrol", "release", str(job)])
        record = runs.wait(job, "COMPLETED", timeout=240)
        kept = cluster.on_node("n1", ["ls", guessed]).stdout.split()
        left = cluster.on_node("n1", ["ls", "/tmp"]).stdout.split()
    finally:
        cluster.on_node("n2", ["umount", "/tmp"], check=False)
        cluster.on_node("n1", ["rm", "-rf", guessed], check=False)
    log = runs.log()
    assert record["Restarts"] == "0" and len(losses(runs.run_folder)) == 2
    no_space = rf"staging failed on n2: \d+ MiB free for {LOCAL_DISK}/megatron_port-.*, at least \d+ needed"
    assert re.search(no_space, log), log
    assert "(n1,n3)" in log and f"port {port} of {cluster.addresses['n1']} is taken, trying the next" in log, log
    assert kept == ["file"] and [n for n in left if n.startswith("megatron_port-")] == [f"megatron_port-{job}"], log


def packed_environment(runs: Runs) -> Path:
    """An archive as ``STAGE`` takes it, of an environment that says where it ran."""
    folder = runs.folder / "environment"
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (folder / "ballast").write_bytes(bytes(1 << 20))
    archive = runs.folder / "env.tar"
    subprocess.run(["tar", "-C", folder, "-cf", archive, "."], check=True)
    return archive


MAPPED = """\
for p in $(pgrep -f '^[^ ]*python[0-9.]* -m megatron_port train'); do
  readlink /proc/$p/exe; awk '$6 ~ /^\\// {print $6}' /proc/$p/maps
done | sort -u
"""


@pytest.mark.slow
def test_ranks_run_from_the_image_that_launch_image_makes(runs: Runs) -> None:
    """Packed from this environment, copied by sbcast, unpacked on two nodes: whatever a rank has mapped is the node's.

    The checkout's files are on the same paths there, as a shared file system's would be.
    """
    archive = runs.folder / "env.tar"
    made = subprocess.run([sys.executable, "-m", "megatron_port", "launch", "image", "-o", str(archive)], cwd=ROOT,
                          text=True, capture_output=True, check=True)
    change = settings(training__steps=400, **SHORT)
    job = runs.submit(["--nodes=2", "--ntasks-per-node=1"], change, env={"STAGE": str(archive)})
    runs.wait_for_step(job, 5, timeout=500)
    found = {name: runs.cluster.on_node(name, ["sh", "-c", MAPPED]).stdout.split() for name in ("n1", "n2")}
    runs.wait(job, "COMPLETED")
    own, system = f"{LOCAL_DISK}/megatron_port-{job}-", ("/usr/", "/lib/", "/lib64/", "/dev/", "/memfd")
    for name, paths in found.items():
        assert any(re.fullmatch(rf"{own}\w+/env/bin/python3[.\d]*", p) for p in paths), (name, paths)
        assert any(p.endswith("libtorch_cpu.so") for p in paths), (name, paths)
        strange = [p for p in paths if not p.startswith((own, *system))]
        assert not strange, (name, strange, made.stdout)
        assert not runs.cluster.on_node(name, ["sh", "-c", f"ls -d {own}* 2> /dev/null"], check=False).stdout
    assert losses(runs.run_folder) == train_here(2, *change)


@pytest.mark.slow
def test_a_chained_job_goes_on(runs: Runs) -> None:
    change = settings(training__steps=60, launch__when_stopped="chain", **SHORT)
    job = runs.submit(["--nodes=3", "--ntasks-per-node=1"], change)
    runs.wait_for_step(job, 10)
    runs.cluster.run(["scancel", "--batch", "--signal=USR1", str(job)])
    runs.wait(job, "COMPLETED")
    runs.wait(job + 1, "COMPLETED")
    assert f"job {job + 1} follows" in runs.log() and "resumed from" in runs.log(), runs.log()
    assert losses(runs.run_folder) == train_here(3, *change)


@pytest.mark.slow
def test_a_sick_node_is_left_out_for_a_spare(runs: Runs) -> None:
    """Preflight in the job, with an environment that is copied to each node's own disk."""
    archive = packed_environment(runs)
    victim = runs.cluster.nodes[1]
    runs.cluster.throttle(victim, 0.2)
    change = settings(training__steps=20, preflight__share_of_median=0.3, **SHORT)
    job = runs.submit(["--nodes=4", "--ntasks-per-node=1"], change,
                      env={"PREFLIGHT": "1", "SPARE_NODES": "1", "STAGE": str(archive)})
    runs.wait(job, "COMPLETED", timeout=240)
    log = runs.log()
    assert "staging" in log and "(n[1,3-4])" in log, log
    assert (runs.run_folder / f"preflight-{job}.0" / "bad.txt").read_text().split() == [victim]
    assert losses(runs.run_folder) == train_here(3, *change)
    left = runs.cluster.on_node("n1", ["ls", "/tmp"]).stdout
    assert "megatron_port-" not in left


@pytest.mark.slow
def test_the_same_failure_three_times_stops_the_run(runs: Runs) -> None:
    job = runs.submit(["--nodes=2", "--ntasks-per-node=1"], settings(backend__device='"cuda"'))
    record = runs.wait(job, "FAILED", timeout=400)
    assert int(record["Restarts"]) == 2
    log = runs.log()
    assert "3 attempts in a row failed without getting past step 0" in log, log
    assert not metrics(runs.run_folder)


WRONG: dict[str, tuple[dict[str, str], list[str], list[str], str]] = {
    # name: environment of sbatch, options of sbatch, arguments of the script, what the log says
    "refused resource": ({"SRUN_OPTIONS": "--gres=gpu:99"}, [], [],
                         "srun did not start the ranks: .*gpu:99 is more than.*Invalid generic resource"),
    "unknown option": ({"SRUN_OPTIONS": "--no-such-thing"}, [], [], "option '--no-such-thing'"),
    "stale torchrun": (STALE, [], [],
                       "this looks like torchrun, but WORLD_SIZE is not set.*unset TORCHELASTIC_RUN_ID"),
    "bad -n": ({}, ["-n3"], [], r"3 tasks \(-n\) on 2 nodes \(-N\)"),
    "too many spares": ({"SPARE_NODES": "2"}, [], [], "2 nodes with 2 spares leave none to train on"),
    "no such interpreter": ({"PYTHON": "/nowhere/python"}, [], [], r"/nowhere/python \(PYTHON, .*\) is no program"),
    "an old interpreter": ({"PYTHON": "OLD"}, [], [], "is Python 3.6.15; this needs Python 3.10 or newer"),
    "no archive": ({"STAGE": "/nowhere/env.tar"}, [], [], r"the archive /nowhere/env.tar .* cannot be read"),
    "no image": ({"IMAGE": "/nowhere/x.sif", "BOX": "1"}, [], [], "no module command here"),
    "a setting that does not divide": ({}, [], ["--set", "layout.tensor_parallel_size=3"], "tensor_parallel_size"),
    "a misspelt setting": ({}, [], ["--set", "training.stepps=3"], "did you mean 'training.steps'|unknown key"),
    "too late": ({}, [], ["--set", "launch.preflight=true"], "comes too late for a script that is made already"),
    "a folder that is a file": ({}, [], ["--set", "output_dir=/etc/hostname"], "cannot be written"),
    "a full folder": ({}, [], ["--set", "output_dir=/dev/full/runs"], "cannot be written"),
}


TRIED_ONCE = ("refused resource", "stale torchrun")
"""What srun or a rank finds out, after the script has started the step; the others, the script itself."""


@pytest.mark.parametrize("names", [
    pytest.param(TRIED_ONCE, id="in the step"),
    pytest.param(tuple(name for name in WRONG if name not in TRIED_ONCE), id="before", marks=pytest.mark.slow),
])
def test_wrong_environments_are_named_and_never_queued_again(runs: Runs, names: tuple[str, ...]) -> None:
    """All at once: each fails before, or in, its first attempt, and says why in one line."""
    old = runs.folder / "old-python"
    old.write_text('#!/bin/sh\ncase "$1" in --version) echo "Python 3.6.15" ;; *) exit 1 ;; esac\n')
    old.chmod(0o755)
    jobs = {}
    for number, name in enumerate(names):
        env, options, arguments, _ = WRONG[name]
        env = {key: str(old) if value == "OLD" else value for key, value in env.items()}
        script = "launch/lumi_22b.sh" if "BOX" in env else "launch/slurm.sh"
        partition = runs.cluster.run(["sinfo", "-ho", "%R"]).stdout.split()[0]
        extra = [f"--partition={partition}", "--cpus-per-task=1"] if "BOX" in env else []
        tasks = [] if options else ["--ntasks-per-node=1"]
        jobs[name] = runs.cluster.sbatch(
            f"--output={runs.folder}/{number}.out", "--nodes=2", *tasks, *options, *extra, str(ROOT / script),
            "runs/quickstart", *settings(), "--set", f"name=job-{number}", "--set", f"output_dir={runs.folder}/runs",
            *arguments, env=environment(**env), cwd=runs.folder,
        )
    for number, (name, job) in enumerate(jobs.items()):
        record = runs.cluster.wait(job, timeout=400)
        log = (runs.folder / f"{number}.out").read_text(errors="replace")
        assert (record["JobState"], record["Restarts"]) == ("FAILED", "0"), f"{name}: {record}\n{log}"
        assert re.search(WRONG[name][3], log), f"{name}:\n{log}"
        assert "Traceback" not in log, f"{name}:\n{log}"
        if name in TRIED_ONCE:
            last = [line for line in log.splitlines() if line][-1]
            assert record["ExitCode"] == "3:0" and "another attempt would meet the same" in log, f"{record}\n{log}"
            assert re.search(f"^launch: first failure: .*{WRONG[name][3]}", last), log
    assert len(WRONG) >= 12
