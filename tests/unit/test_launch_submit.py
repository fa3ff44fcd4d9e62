"""``launch render | submit``: what is checked, where the script goes, what sbatch is told and what it says."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_port.cli.main import main
from megatron_port.tools.launch.submit import launch_folder

RUN = """\
extends = ["models/gpt-tiny", "clusters/slurm"]
name = "my run"
[data]
synthetic = true
[cluster]
gpus_per_node = 2
nodes = 4
[layout]
tensor_parallel_size = 2
pipeline_parallel_size = 2
[launch]
time = "01:00:00"
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a run file and a PATH of its own."""
    folder = tmp_path / "it's here"
    (folder / "bin").mkdir(parents=True)
    (folder / "run.toml").write_text(RUN)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.defpath}")
    monkeypatch.delenv("PYTHON", raising=False)
    return folder


def tool(here: Path, name: str, text: str) -> None:
    path = here / "bin" / name
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)


def test_render_prints(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "render", "run.toml", "--set", "training.steps=7", "--set", "cluster.nodes=2"]) == 0
    text = capsys.readouterr().out
    quoted = str(here).replace("'", "'\\''")
    assert f"job_run='{quoted}/run.toml'\n" in text
    assert "job_overrides=(--set training.steps=7)\n" in text, "the number of nodes comes from the allocation"
    assert '#SBATCH --job-name="my run"\n' in text and "#SBATCH --nodes=2\n" in text
    assert f"launch_dir={launch_folder()}\n" in text
    assert sorted(p.name for p in here.iterdir()) == ["bin", "run.toml"]
    if shutil.which("shellcheck", path=os.defpath):
        done = subprocess.run(["shellcheck", "-"], input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_a_time_on_the_command_line_needs_no_quotes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """02:00:00 is a time of day to TOML."""
    assert main(["launch", "render", "run.toml", "--set", "launch.time=02:30:00"]) == 0
    assert "#SBATCH --time=02:30:00\n" in capsys.readouterr().out


def test_a_shipped_run_keeps_its_name(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "render", "runs/frontier-1t"]) == 0
    assert "job_run=runs/frontier-1t\n" in capsys.readouterr().out
    shutil.copy(launch_folder().parent / "configs" / "runs" / "frontier-22b.toml", here / "mine.toml")
    assert main(["launch", "render", "mine", "--after", "12", "-o", "out/job.sh"]) == 0
    assert not capsys.readouterr().out
    text = (here / "out" / "job.sh").read_text()
    assert "/mine.toml'\n" in text and "#SBATCH --dependency=afterany:12\n" in text
    assert (here / "out" / "job.sh").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize(("arguments", "words"), [
    (["--set", "cluster.nodes=0"], "--set cluster.nodes=N"),
    (["--set", "launch.time=1h"], "must be MM"),
    (["--set", "layout.tensor_parallel_size=3"], "tensor_parallel_size"),
    (["--set", "cluster.nodes=3"], "a world of 6 ranks does not divide by"),
    (["--set", 'launch.python="a\\nb"'], "launch.python has the character U+000A"),
    (["--set", 'launch.environment=["A={x}"]'], "{x} is unknown"),
    (["--after", "1;touch x"], "is no job id"),
    (["--", "-N", "4"], "takes nothing after --"),
])
def test_faults_before_a_script_is_made(
    here: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "render", "run.toml", *arguments]) == 2
    out, err = capsys.readouterr()
    assert words in err and not out


def test_all_problems_at_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["launch.time=1h", "launch.max_attempts=0", "launch.spare_nodes=1", "seed=-1"]
    assert main(["launch", "submit", "run.toml", *(x for c in changes for x in ("--set", c))]) == 2
    err = capsys.readouterr().err
    assert "4 problems" in err and not (here / "runs").exists()


def test_submit(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool(here, "sbatch", 'printf "%s\\n" "$@" > said; echo "sbatch: a warning" >&2; echo "123;cluster"\n')
    tool(here, "scontrol", '[ "$3" = 123 ] && echo "   StdOut=/some where/x-123.out"\n')
    options = ["-N", "8", "--comment=a b", "--"]
    assert main(["launch", "submit", "run.toml", "--set", "seed=3", "--", *options]) == 0
    script = here / "runs" / "my run" / "launch" / "0001" / "job.sh"
    assert capsys.readouterr().out == f"job 123, script {script}, log /some where/x-123.out\n"
    assert (here / "said").read_text().splitlines() == ["--parsable", *options, str(script)]
    assert script.stat().st_mode & 0o777 == 0o755 and "seed = 3" in script.with_name("config.toml").read_text()
    tool(here, "scontrol", "exit 1\n")
    tool(here, "squeue", "exit 0\n")
    assert main(["launch", "submit", "run.toml"]) == 0
    assert capsys.readouterr().out.endswith(f"log {here}/my run-123.out\n")


def test_dry_run_runs_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool(here, "sbatch", "touch ran\n")
    assert main(["launch", "submit", "run.toml", "--dry-run", "--", "--comment=a b"]) == 0
    out = capsys.readouterr().out
    assert "sbatch --parsable '--comment=a b' '" in out and "runs/my run/launch/0001/job.sh'" in out
    assert "\n#!/bin/bash\n" in out
    assert sorted(p.name for p in here.iterdir()) == ["bin", "run.toml"]


def test_what_sbatch_refuses(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool(here, "sbatch", 'echo "sbatch: error: invalid partition specified: x" >&2; exit 1\n')
    assert main(["launch", "submit", "run.toml"]) == 3
    err = capsys.readouterr().err
    assert "invalid partition specified: x" in err and "runs/my run/launch/0001/job.sh'" in err
    assert not (here / "runs" / "my run").exists()
    tool(here, "sbatch", 'echo "sbatch: Job 5 to start at 2030" >&2\n')
    assert main(["launch", "submit", "run.toml", "--", "--test-only"]) == 0
    assert capsys.readouterr().out == "sbatch: Job 5 to start at 2030\n"


def test_without_slurm(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(here / "bin"))
    assert main(["launch", "submit", "run.toml"]) == 3
    assert "sbatch is not installed here; run this on a login node of slurm" in capsys.readouterr().err
