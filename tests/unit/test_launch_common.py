"""``launch/common.sh`` as bash runs it, with stand-ins for SLURM's tools and Python that write down what they get."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_port.tools.launch.submit import launch_folder

TOOLS = ("awk", "bash", "cat", "cut", "date", "df", "getent", "grep", "head", "hostname", "id", "mkdir", "mktemp", "mv",
         "od", "paste", "rm", "sed", "sleep", "sort", "stat", "tail", "tar", "tee", "timeout", "tr")
JOB = """\
set -euo pipefail
site_name=here site_interface= site_local_disk={disk} site_cores_per_task=0 site_srun=()
site_setup() {{ :; }}
job_run=a.toml job_python= job_stage= job_spare_nodes=0 job_preflight=0 job_overrides=()
job_setup() {{ :; }}
launch_dir={launch}
source "$launch_dir/common.sh"
launch_main "$@"
"""
PYTHON = """\
case "$*" in
  *"launch before"*) echo "before $*" >> "$RUN_FOLDER/calls"; echo "$RUN_FOLDER"; echo "$RUN_FOLDER/launch/0001"
    echo "${WHEN_LOST:-stop}" ;;
  *"launch after"*) echo "after $*" >> "$RUN_FOLDER/calls" ;;
esac
"""
SCONTROL = """\
[ "$2" = hostnames ] || exit 0
for n in n1 n2 n3; do echo $n; done
"""
SRUN = 'echo "srun $*" >> "$RUN_FOLDER/calls"\n'


class Job:
    """A job script of three nodes that do not exist."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin, self.runs = folder, folder / "bin", folder / "run"
        for made in (self.bin, self.runs, folder / "disk"):
            made.mkdir()
        (self.runs / "launch" / "0001").mkdir(parents=True)
        (self.runs / "launch" / "0001" / "config.toml").write_text('name = "x"\n')
        for name in TOOLS:
            (self.bin / name).symlink_to(shutil.which(name) or f"/missing/{name}")
        self.tool("python", PYTHON)
        self.tool("scontrol", SCONTROL)
        self.tool("srun", SRUN)
        (folder / "job.sh").write_text(JOB.format(launch=launch_folder(), disk=folder / "disk"))

    def tool(self, name: str, text: str) -> None:
        (self.bin / name).write_text("#!/bin/bash\n" + text)
        (self.bin / name).chmod(0o755)

    def run(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", self.folder / "job.sh", *arguments], text=True, capture_output=True, timeout=60, check=False,
            env={"PATH": str(self.bin), "USER": "ann", "PYTHON": str(self.bin / "python"), "SLURM_JOB_ID": "7",
                 "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_NTASKS_PER_NODE": "1", "RUN_FOLDER": str(self.runs), **env},
        )

    def calls(self) -> str:
        path = self.runs / "calls"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """On a port of the range that job scripts use."""
    with socket.socket() as found:
        while True:
            with contextlib.suppress(OSError):
                found.bind(("127.0.0.1", random.randrange(15000, 31900)))
                break
        found.listen()
        yield found


def test_the_ranks_are_started_and_the_end_is_told(job: Job) -> None:
    done = job.run()
    assert done.returncode == 0, done.stderr
    record = f"{job.runs}/launch/0001"
    assert "launch before a.toml" in job.calls()
    assert f"megatron_port train {record}/config.toml" in job.calls() and "--master-port 15217" in job.calls()
    assert f"launch after {record}/config.toml" in job.calls() and f"--record {record} --code 0" in job.calls()


@pytest.mark.parametrize(("env", "found"), [
    ({"SLURM_NTASKS": "6"}, "--ntasks=6 --ntasks-per-node=2"), ({"SLURM_NTASKS": "3"}, "--ntasks=3"),
    ({"SLURM_NTASKS": "6", "SLURM_NTASKS_PER_NODE": "4"}, "--ntasks=6 --ntasks-per-node=2"),
    ({"SLURM_NTASKS": "12", "SLURM_NTASKS_PER_NODE": "4"}, "--ntasks=12 --ntasks-per-node=4"),
    ({"SLURM_GPUS_ON_NODE": "8"}, "--ntasks=24 --ntasks-per-node=8"),
    ({"SLURM_NTASKS": "6", "SLURM_JOB_CPUS_PER_NODE": "32(x3)"}, "--cpu-bind=cores"),
])
def test_the_tasks_that_were_asked_for_are_started(job: Job, env: dict[str, str], found: str) -> None:
    done = job.run(**{"SLURM_NTASKS_PER_NODE": "", **env})
    assert done.returncode == 0, done.stderr
    call = next(line for line in job.calls().splitlines() if "train" in line)
    assert found in call and ("--cpus-per-task=16" in call) == ("32(x3)" in env.values()), call


@pytest.mark.parametrize("tasks", ["1", "4", "7"])
def test_tasks_that_do_not_divide_are_refused_at_once(job: Job, tasks: str) -> None:
    done = job.run(SLURM_NTASKS=tasks)
    assert done.returncode == 3 and f"error: {tasks} tasks (-n) on 3 nodes (-N)" in done.stderr, done.stderr
    assert not job.calls()


def test_the_configuration_of_a_record_cannot_be_changed(job: Job) -> None:
    """A script of `launch submit`, given to sbatch by hand."""
    script = job.folder / "job.sh"
    script.write_text(script.read_text().replace("job_run=a.toml", f"job_record={job.runs}/launch/0001 job_run=a.toml"))
    for arguments in (["--set", "seed=1"], ["b.toml"], ["--data=x"]):
        done = job.run(*arguments)
        assert done.returncode == 2 and "the configuration of this script is kept in" in done.stderr, done.stderr
    assert not job.calls() and job.run().returncode == 0
    assert f"--record {job.runs}/launch/0001" in job.calls()


def test_without_srun_nothing_is_begun(job: Job) -> None:
    """It was tried three times, and 'no rank said why'."""
    (job.bin / "srun").unlink()
    done = job.run()
    assert done.returncode == 3 and done.stderr.startswith("error: no srun on "), done.stderr
    assert job.calls() == "", "neither an attempt nor its end"


def test_master_flags_of_the_job_reach_the_ranks(job: Job) -> None:
    for arguments in (["--master-addr", "127.0.0.1", "--master-port", "4444"],
                      ["--master-addr=127.0.0.1", "--master-port=4444"]):
        done = job.run("b.toml", *arguments, "--resume", "never")
        assert done.returncode == 0, done.stderr
        call = next(line for line in job.calls().splitlines() if "train" in line)
        assert call.endswith("--resume never --master-addr 127.0.0.1 --master-port 4444")
        assert "launch before b.toml" in job.calls()
        (job.runs / "calls").unlink()


def test_a_port_that_is_taken_is_left_alone(job: Job, listener: socket.socket) -> None:
    """15000 + (31 x job + 2 x restarts) mod 17000 is the first that is tried."""
    number = listener.getsockname()[1]
    done = job.run("--master-addr", "127.0.0.1", SLURM_JOB_ID=str((number - 15000) * pow(31, -1, 17000) % 17000))
    assert f"port {number} of 127.0.0.1 is taken, trying the next" in done.stdout, done.stdout + done.stderr
    assert f"--master-port {15000 + (number - 15000 + 34) % 17000}" in job.calls()


def test_a_port_that_was_asked_for_and_is_taken_ends_the_job(job: Job, listener: socket.socket) -> None:
    number = listener.getsockname()[1]
    done = job.run("--master-addr", "127.0.0.1", "--master-port", str(number))
    assert f"port {number} of 127.0.0.1, which --master-port names, is taken" in done.stderr, done.stderr
    assert "train" not in job.calls() and "--not-started setup" in job.calls()


@pytest.mark.parametrize(("asked", "why"), [("USR1", "signal"), ("TERM", "ended")])
def test_a_signal_before_the_ranks_starts_none(job: Job, asked: str, why: str) -> None:
    job.tool("python", PYTHON.replace('echo "$RUN_FOLDER";', f'kill -s {asked} $PPID; echo "$RUN_FOLDER";'))
    job.run()
    assert "train" not in job.calls() and f"--asked {asked} --not-started {why}" in job.calls(), job.calls()


def test_every_signal_is_told_in_its_order(job: Job) -> None:
    job.tool("srun", 'trap "" USR1; kill -s USR1 $PPID; sleep 0.3; kill -s TERM $PPID; sleep 0.3\n')
    job.run()
    assert "--asked USR1 TERM" in job.calls(), job.calls()


@pytest.mark.parametrize(
    ("there", "needed", "why"),
    [("nothing", 1, ""), ("folder", 1, "File exists"), ("link", 1, "File exists"), ("no parent", 1, "No such file"),
     ("nothing", 1 << 50, r"MiB free for .*, at least \d+ needed")],
)
def test_staging_makes_its_folder_itself_or_not_at_all(tmp_path: Path, there: str, needed: int, why: str) -> None:
    """What another user has prepared under that name is neither entered nor followed."""
    to, results = tmp_path / "disk" / "env", tmp_path / "results"
    results.mkdir()
    if there != "no parent":
        to.parent.mkdir()
    if there == "folder":
        to.mkdir(mode=0o777)
    elif there == "link":
        (tmp_path / "theirs").mkdir()
        to.symlink_to(tmp_path / "theirs")
    script = f'source {launch_folder()}/common.sh; umask 0; bash -c "$stage_prepare" stage {to} {needed} {results}'
    done = subprocess.run(["bash", "-c", script], text=True, capture_output=True, check=False,
                          env={"PATH": os.environ["PATH"], "LC_ALL": "C", "SLURMD_NODENAME": "n1"})
    assert done.returncode == 0, done.stderr
    if why:
        assert re.search(why, (results / "bad-n1").read_text()) and not (results / "ready-n1").exists()
    else:
        assert (results / "ready-n1").exists() and to.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("spares", "srun", "expected"), [
    ("0", "(--gpus-per-task=1 --gpu-bind=closest --threads-per-core=1)", ["--gpus-per-node=8", "--threads-per-core=1"]),
    ("1", "(--cpu-bind=mask_cpu:0xfe,0xfe00 --gpus-per-node=8)", ["--gpus-per-node=8"]),
])
def test_where_lost_ranks_are_replaced_a_process_of_each_node_starts_them(
    job: Job, spares: str, srun: str, expected: list[str]
) -> None:
    script = job.folder / "job.sh"
    made = script.read_text()
    script.write_text(made.replace("site_cores_per_task=0 site_srun=()", f"site_cores_per_task=7 site_srun={srun}"))
    done = job.run("--set", "a.b=1", WHEN_LOST="replace", SPARE_NODES=spares, SLURM_NTASKS_PER_NODE="8")
    assert done.returncode == 0, done.stderr
    call, = (line for line in job.calls().splitlines() if line.startswith("srun "))
    words = call.split()
    ours = ["--nodelist=n1,n2,n3", "--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--export=ALL", "--no-kill",
            "--kill-on-bad-exit=0", "--wait=0", "--distribution=block", "--cpus-per-task=56"]
    first = words.index(ours[0])
    assert words[first : first + len(ours)] == ours, "behind the site's options, so that they win"
    assert set(expected) <= set(words) and not [w for w in words if "bind" in w or "gpus-per-task" in w], call
    assert call.endswith(f"--nproc 8 --set launch.spare_nodes={spares}") and f"cluster.nodes={3 - int(spares)}" in call
    assert "sbatch --no-kill" in done.stdout
