"""Scripts and specifications for other schedulers: what they ask for, and that two ranks of them meet."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from test_launch_script import parsed_by_sbatch, sbatch_arguments
from test_launch_submit import here, tool  # noqa: F401 - here is a fixture

from megatron_port.cli.main import main
from megatron_port.core.config.layout import with_values
from megatron_port.core.config.loader import Loaded, load
from megatron_port.core.errors import ConfigError
from megatron_port.tools.launch.opening import with_record
from megatron_port.tools.launch.script import KINDS, Order, emit, render
from megatron_port.tools.launch.sweep import SweepTask, script_of

ROOT = Path(__file__).resolve().parents[2]
DISCOVER = """\
import json
from megatron_port.run.discovery import discover
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


HOSTILE = ("two words", "x --wrap=evil", "it's", 'say "hi"', "$(touch x)", "`touch x`", "a;touch x", "x#y", "-N 99",
           "{{id}}", "%j", "back\\slash", "é 漢", "$HOME", "&& touch x", "a\u00a0b")


def options_of(script: str) -> list[str]:
    """The words of a script's directives; shlex reads them as Flux does, SLURM's as sbatch does."""
    if "#SBATCH" in script:
        return sbatch_arguments(script)
    heads = [line.split(" ", 1)[1] for line in script.split("\n") if line.startswith(("#flux: ", "#PBS ", "#BSUB "))]
    return [word for head in heads for word in shlex.split(head, comments=True)]


@pytest.mark.parametrize("kind", ["slurm", "sweep", *KINDS])
def test_hostile_texts_stay_values(
    here: Path, monkeypatch: pytest.MonkeyPatch, kind: str,  # noqa: F811
) -> None:
    """A run's name, account, queue, variable, option of ``train``: the options are those of a plain name, no others."""
    def text_of(text: str, account: str = "abc") -> str:
        config = with_values(load("run.toml").config, {
            "name": f"a{text}", "launch.account": account, "cluster.partition": account, "cluster.container": "podman",
            "launch.environment": (f"A={text}",), "cluster.container_image": f"r.io/{account}", "launch.stage": text})
        order = Order(run=f"/runs/{text}.toml", overrides=(f"name={text}",))
        if kind in KINDS:
            return emit(kind, config, order, "/usr/bin/python", "H100")
        if kind == "slurm":
            return render(config, order, launch_dir=here / text)
        task = SweepTask(0, Loaded(config, {}, ("run.toml",)), ())
        return script_of([task], here, f"{text}-sweep", 0)

    def names(script: str) -> list[str]:
        return [word.partition("=")[0] if word.startswith("-") else "" for word in options_of(script)]

    plain = text_of("plain")
    for text in HOSTILE:
        said = text_of(text)
        if kind in ("jobset", "skypilot"):
            shown = json.loads(said)
            assert json.dumps(shown).count(json.dumps(text.replace("$", "$$") if kind == "jobset" else text)) >= 1
            continue
        assert names(said) == names(plain), said
        assert kind not in KINDS or all(re.fullmatch(r"[\w./:@%+={}-]+", w, re.ASCII) for w in options_of(said)), said
        script = here / "job.sh"
        script.write_text(said)
        # All but the launcher itself is run; a text that is a command would leave a file.
        body = re.sub(r"^(exec|source) .*(\\\n.*)*$", "", said, flags=re.MULTILINE).replace("launch_main", "#")
        ran = subprocess.run(["bash", "-c", f"{body}\n:"], cwd=here, capture_output=True, text=True, check=False,
                             env={"PATH": "/usr/bin:/bin", "SLURM_ARRAY_TASK_ID": "0", "PBS_O_WORKDIR": str(here),
                                  "PBS_NODEFILE": "/dev/null", "LSB_DJOB_HOSTFILE": "/dev/null"})
        assert "syntax error" not in ran.stderr and not (here / "x").exists(), said
        assert subprocess.run(["bash", "-n"], input=said, text=True, check=False).returncode == 0
    for text in set(HOSTILE) - {"%j"}:
        if kind in ("flux", "pbs", "lsf"):
            with pytest.raises(ConfigError, match="cluster.partition is .* a directive of this scheduler"):
                text_of("plain", text)


@pytest.mark.skipif(not shutil.which("sbatch"), reason="sbatch is not installed")
@pytest.mark.parametrize("name", ["two words", "x --wrap=evil", "it's # \\"])
def test_sbatch_itself_reads_a_sweeps_name(here: Path, name: str) -> None:  # noqa: F811
    task = SweepTask(0, Loaded(with_values(load("run.toml").config, {"name": name}), {}, ("run.toml",)), ())
    text = parsed_by_sbatch(script_of([task], here, f"{name}-sweep", 0), here)
    assert re.search(rf"^sbatch: job-name +: {re.escape(name)}-sweep$", text, re.MULTILINE), text
    assert not re.search(r"^sbatch: wrap ", text, re.MULTILINE)


def test_no_line_is_cut_within_a_value(here: Path) -> None:  # noqa: F811
    """U+2028 ends a line for str.splitlines, and for no scheduler."""
    config = with_values(load("run.toml").config, {"launch.account": "x\u2028#SBATCH --uid=0", "cluster.nodes": 1})
    task = SweepTask(0, Loaded(config, {}, ("run.toml",)), ())
    script = script_of([task], here, "a-sweep", 0)
    assert "--account=x\u2028#SBATCH --uid=0" in sbatch_arguments(script)
    assert not any(line.startswith("#SBATCH --uid") for line in script.split("\n"))
    assert with_record(render(config, Order(run="/x"), launch_dir=here), here).count("\u2028") == 1
