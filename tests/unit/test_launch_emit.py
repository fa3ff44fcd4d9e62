"""Scripts and specifications for other schedulers: what they ask for, and that two ranks of them meet."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from test_launch_submit import here, tool  # noqa: F401 - here is a fixture

from megatron_port.cli.main import main
from megatron_port.config.loader import load

ROOT = Path(__file__).resolve().parents[2]
DISCOVER = """\
import json
from megatron_port.runtime.discovery import discover
i = discover(resolve=lambda name: ["10.0.0.1"])
print(json.dumps([i.rank, i.world_size, i.local_rank, i.num_nodes, i.master_addr, i.master_port, i.launcher]))
"""
# Each stand-in starts two processes with the variables that the real launcher documents.
FLUX = """\
case $1 in
  hostlist) echo n1 ;;
  run) shift; while [ "$1" != "$PYTHON" ]; do shift; done
    export FLUX_JOB_SIZE=2 FLUX_TASK_LOCAL_ID=0 FLUX_JOB_NNODES=2 FLUX_JOB_ID=f1
    for r in 0 1; do FLUX_TASK_RANK=$r "$@"; done ;;
esac
"""
MPIEXEC = """\
while [ "$1" != "$PYTHON" ]; do shift; done
for r in 0 1; do PALS_RANKID=$r PALS_SIZE=2 PALS_LOCAL_RANKID=0 PALS_LOCAL_SIZE=1 PALS_NODEID=$r PALS_APID=a "$@"; done
"""
JSRUN = """\
while [ "$1" != "$PYTHON" ]; do shift; done
for r in 0 1; do JSM_NAMESPACE_RANK=$r JSM_NAMESPACE_SIZE=2 JSM_NAMESPACE_LOCAL_RANK=0 JSM_NAMESPACE_LOCAL_SIZE=1 \\
  LSB_JOBID=7 "$@"; done
"""


def shown(capsys: pytest.CaptureFixture[str], kind: str, *arguments: str) -> str:
    assert main(["launch", "show", "run.toml", "--for", kind, "--set", "seed=3", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(("kind", "launcher", "text", "name", "says"), [
    ("flux", "flux", FLUX, "flux", ["#flux: -N 4", "#flux: -n 8", "#flux: -t 60m", "--gpus-per-task=1"]),
    ("pbs", "mpiexec", MPIEXEC, "pals", ["#PBS -l select=4:ngpus=2:mpiprocs=2", "walltime=01:00:00", "--ppn 2"]),
    ("lsf", "jsrun", JSRUN, "jsrun", ["#BSUB -nnodes 4", "#BSUB -W 60", "-r 2 -a 1 -g 1"]),
])
def test_a_script_starts_ranks_that_find_each_other(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,  # noqa: F811
    kind: str, launcher: str, text: str, name: str, says: list[str],
) -> None:
    tool(here, "rank", f'echo "$@" >> words\nexec {sys.executable} discover.py\n')
    tool(here, launcher, text)
    (here / "discover.py").write_text(DISCOVER)
    (here / "hosts").write_text(f"{socket.gethostname()}\nn1\nn1\n" if kind == "lsf" else "n1\nn1\n")
    python = str(here / "bin" / "rank")
    monkeypatch.setenv("PYTHON", python)
    script = shown(capsys, kind)
    assert all(words in script for words in says), script
    (here / "job.sh").write_text(script)
    done = subprocess.run(
        ["bash", "job.sh"], cwd=here, text=True, capture_output=True, check=False,
        env={"PATH": f"{here / 'bin'}:/usr/bin:/bin", "PYTHON": python, "USER": "ann", "PBS_O_WORKDIR": str(here),
             "PBS_NODEFILE": str(here / "hosts"), "LSB_DJOB_HOSTFILE": str(here / "hosts"), "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert (here / "words").read_text().splitlines() == [f"-m megatron_port train {here}/run.toml --set seed=3"] * 2
    ranks = [json.loads(line) for line in done.stdout.splitlines()]
    assert [r[:4] for r in ranks] == [[0, 2, 0, 2], [1, 2, 0, 2]] and {r[6] for r in ranks} == {name}
    assert len({(r[4], r[5]) for r in ranks}) == 1 and ranks[0][4] == "n1"


@pytest.mark.parametrize("kind", ["flux", "pbs", "lsf"])
def test_scripts_are_clean(here: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:  # noqa: F811
    text = shown(capsys, kind)
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", "-"], input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_a_jobset_names_every_pod_and_its_master(here: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    image = ["--set", "cluster.container=podman", "--set", "cluster.container_image=r.io/x:1"]
    items = json.loads(shown(capsys, "jobset", *image))["items"]
    config, jobset = items
    (here / "c.toml").write_text(config["data"]["config.toml"])
    assert load(here / "c.toml").config.seed == 3 and jobset["kind"] == "JobSet"
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (4, 4, "Indexed")
    [container] = job["template"]["spec"]["containers"]
    command = container["command"][-1]
    assert "--nnodes=4 --nproc-per-node=2 --node-rank=$JOB_COMPLETION_INDEX " in command
    assert "--master-addr=my-run-ranks-0-0.my-run " in command
    assert container["image"] == "r.io/x:1" and container["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert main(["launch", "show", "run.toml", "--for", "jobset"]) == 2
    assert "cluster.container_image is empty" in capsys.readouterr().err


def test_a_task_for_skypilot(here: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    task = json.loads(shown(capsys, "skypilot", "--gpu", "A100"))
    assert (task["num_nodes"], task["resources"]) == (4, {"accelerators": "A100:2"})
    assert "--node-rank=$SKYPILOT_NODE_RANK" in task["run"] and "seed = 3" in task["setup"]
    for text in (task["run"], task["setup"]):
        assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    sky = pytest.importorskip("sky", reason="the schema of tasks is in skypilot")
    assert sky.Task.from_yaml_config(task).num_nodes == 4
