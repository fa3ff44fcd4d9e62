"""The shipped job scripts as sbatch reads them, unchanged, on machines of the size that they ask for."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest
from cluster import Cluster, Options, Shape, start_directory, why_not
from jobs import ROOT

pytestmark = pytest.mark.slurm


@pytest.mark.parametrize("name", ["frontier_22b", "frontier_175b", "frontier_1t", "frontier_1t_tp4"])
def test_frontier_accepts_the_script(directory: Cluster, name: str) -> None:
    done = directory.run(["sbatch", "--test-only", str(ROOT / "launch" / f"{name}.sh")], check=False)
    assert done.returncode == 0 and "to start at" in done.stderr, done.stderr


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Cluster]:
    """64 nodes on paper with the partitions and features of LUMI-G and Perlmutter."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    shape = Shape(features=("gpu", "hbm80g"), reserved_cores=0)
    partitions = {"gpu": "MaxTime=48:00:00", "standard-g": "MaxTime=48:00:00"}
    with start_directory(64, prefix="nid", options=Options(shape=shape, partitions=partitions)) as cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lumi_22b", "lumi_175b", "perlmutter_22b", "perlmutter_175b"])
def test_the_other_sites_accept_the_script(elsewhere: Cluster, name: str) -> None:
    done = elsewhere.run(["sbatch", "--test-only", str(ROOT / "launch" / f"{name}.sh")], check=False)
    assert done.returncode == 0 and "to start at" in done.stderr, done.stderr


def test_frontier_refuses_more_than_it_allows(directory: Cluster) -> None:
    """The directory does hold jobs against the queue's limits; otherwise the test above would show nothing."""
    script = str(ROOT / "launch" / "frontier_22b.sh")
    assert directory.run(["sbatch", "--test-only", "--time=13:00:00", script], check=False).returncode
    assert directory.run(["sbatch", "--test-only", "--nodes=385", script], check=False).returncode
    assert directory.run(["sbatch", "--test-only", "--constraint=none", script], check=False).returncode


def test_a_rendered_script_keeps_hostile_words(cluster: Cluster) -> None:
    """Through the real sbatch: name, log and overrides arrive as they were written, and nothing is run."""
    folder = cluster.shared / "it's $(touch x) \"here\""
    folder.mkdir()
    (folder / "stub").mkdir()
    (folder / "stub" / "common.sh").write_text(
        'launch_main() { printf "%s\\n" "$job_run" "${job_overrides[@]}" "$SLURM_JOB_NAME"; }\n'
    )
    (folder / "a run.toml").write_text(
        'extends = ["models/gpt-tiny", "clusters/slurm"]\nname = "a $(touch x) `touch x` \'name\' \\"q\\" #;&|"\n'
        "[cluster]\nnodes = 1\ngpus_per_node = 1\n[data]\nsynthetic = true\n"
    )
    script = folder / "job.sh"
    rendered = subprocess.run(
        [sys.executable, "-m", "megatron_port", "launch", "render", str(folder / "a run.toml"),
         "--set", "output_dir=$(touch y) 'z'", "-o", str(script)],
        cwd=ROOT, text=True, capture_output=True,
    )
    assert rendered.returncode == 0, rendered.stderr
    lines = script.read_text().splitlines()
    place = [i for i, line in enumerate(lines) if line.startswith("launch_dir=")]
    lines[place[0]] = f"launch_dir={shlex.quote(str(folder / 'stub'))}"
    script.write_text("\n".join(lines) + "\n")
    job = cluster.sbatch("--output=log.out", str(script), cwd=folder)
    cluster.wait(job)
    log = (folder / "log.out").read_text().splitlines()
    assert log == [str(folder / "a run.toml"), "--set", "output_dir=$(touch y) 'z'",
                   "a $(touch x) `touch x` 'name' \"q\" #;&|"], log
    assert not list(folder.glob("[xy]")) and not (ROOT / "x").exists()
