"""Ranks in a container, in ``launch/common.sh``: command lines of stand-ins that write down what they get."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_launch_common import Job

from megatron_port.core.config.layout import with_values
from megatron_port.core.config.schema import RunConfig
from megatron_port.tools.launch.launch_checks import launch_problems
from megatron_port.tools.launch.script import site_block
from megatron_port.tools.launch.submit import launch_folder

SRUN = """\
echo "srun $*" >> "$RUN_FOLDER/calls"
for word; do case $word in apptainer|singularity|podman|podman-hpc|shifter) found=1 ;; esac
  [ -z "${found:-}" ] || break
  shift; done
[ $# = 0 ] || "$@"
"""
RUNTIME = 'echo "$(basename "$0") $*" >> "$RUN_FOLDER/calls"\nfor tool in scontrol srun sbcast; do :; done\n'


@pytest.fixture
def job(tmp_path: Path) -> Job:
    found = Job(tmp_path)
    for name in ("dirname", "basename"):
        (found.bin / name).symlink_to(f"/usr/bin/{name}")
    found.tool("srun", SRUN)
    return found


def in_container(job: Job, runtime: str, *, installed: bool = True, **more: object) -> None:
    """Let the site's ranks run in a container."""
    values = {
        "cluster.name": "here", "cluster.container": runtime, "cluster.container_image": "registry/image:1",
        "cluster.container_mounts": ("/scratch/{user}", "/appl:/opt/appl:ro"), "cluster.container_options": ("--rocm",),
        "cluster.local_disk": str(job.folder / "disk"), **{f"cluster.container_{k}": v for k, v in more.items()},
    }
    script = job.folder / "job.sh"
    lines = script.read_text().splitlines()
    head = [line for line in lines if not line.startswith(("site_name", "site_setup"))]
    block = site_block(with_values(RunConfig(), values).cluster)
    script.write_text("\n".join([*head[:1], block, *head[1:]]) + "\n")
    if installed and runtime != "pyxis":
        job.tool(runtime, RUNTIME)


def call_of(job: Job, runtime: str) -> str:
    return next(line for line in job.calls().splitlines() if line.startswith(f"{runtime} ") and " train " in line)


@pytest.mark.parametrize(("runtime", "begins", "mount", "ends"), [
    ("apptainer", "exec --pwd {cwd} --bind {cwd}:{cwd}", "--bind /scratch/ann:/scratch/ann",
     "--rocm registry/image:1 py"),
    ("singularity", "exec --pwd {cwd}", "--bind /appl:/opt/appl:ro", "--rocm registry/image:1 py"),
    ("podman", "run --rm --network=host --ipc=host --pid=host", "--volume /scratch/ann:/scratch/ann",
     "--rocm registry/image:1 py"),
    ("podman-hpc", "run --rm --network=host", "--env SLURM_* --env MEGATRON_PORT_*", "--rocm registry/image:1 py"),
    ("shifter", "--image=registry/image:1 --workdir={cwd}", "--volume=/scratch/ann:/scratch/ann", "--rocm py"),
])
def test_ranks_start_in_the_container_and_slurm_stays_outside(
    job: Job, runtime: str, begins: str, mount: str, ends: str
) -> None:
    in_container(job, runtime, python="py")
    done = job.run()
    assert done.returncode == 0, done.stderr
    call = call_of(job, runtime)
    assert call.startswith(f"{runtime} {begins.format(cwd=Path.cwd())}") and mount in call, call
    assert f"{ends} -m megatron_port train {job.runs}/launch/0001/config.toml" in call, call
    assert f"{job.runs}:{job.runs}" in call and str(job.folder / "disk") in call, "the run's folder, the node's disk"
    outside = [line for line in job.calls().splitlines() if "launch before" in line or "launch after" in line]
    assert len(outside) == 2 and not any(line.startswith(runtime) for line in outside)


def test_pyxis_is_told_by_srun(job: Job) -> None:
    in_container(job, "pyxis", options=("--container-writable",))
    assert job.run().returncode == 0
    call = next(line for line in job.calls().splitlines() if " train " in line)
    assert f"--container-image=registry/image:1 --container-mounts={Path.cwd()}:{Path.cwd()}," in call, call
    assert f"--container-workdir={Path.cwd()} --container-writable" in call and "/appl:/opt/appl:ro" in call
    assert call.index("--container-writable") < call.index("python3 -m megatron_port train")


@pytest.mark.parametrize(("change", "env", "says"), [
    ({"image": ""}, {}, "no image is named: set cluster.container_image, or IMAGE="),
    ({"image": "/nowhere/x.sif"}, {}, "the image /nowhere/x.sif cannot be read"),
    ({"installed": False}, {}, "no apptainer on "),
])
def test_what_is_missing_is_said_before_the_ranks(job: Job, change: dict, env: dict, says: str) -> None:
    in_container(job, "apptainer", **change)
    done = job.run(**env)
    assert says in done.stderr, done.stderr
    assert " train " not in job.calls() and "--not-started setup" in job.calls()


def test_the_image_of_the_environment_wins(job: Job) -> None:
    image = job.folder / "x.sif"
    image.write_bytes(b"")
    in_container(job, "apptainer")
    assert job.run(IMAGE=str(image)).returncode == 0
    assert f"--rocm {image} python3 -m megatron_port train" in call_of(job, "apptainer")


@pytest.mark.parametrize(("changes", "says"), [
    ({"container_mounts": ("scratch",)}, "is not of the form SOURCE"),
    ({"container_mounts": ("/a:b",)}, "SOURCE:TARGET"), ({"container_options": ("rocm",)}, "not one option"),
    ({"container": "", "container_image": "x"}, "name the runtime"),
    ({"container_mounts": ("/{usr}",)}, "{usr} is unknown"), ({"container_mounts": ("/a,/b",)}, "SOURCE"),
])
def test_settings_that_make_no_container(changes: dict, says: str) -> None:
    values = {"cluster.nodes": 1, "cluster.container": "apptainer", **{f"cluster.{k}": v for k, v in changes.items()}}
    assert any(says in text for text in launch_problems(with_values(RunConfig(), values)))


def test_the_shell_files_are_found_beside_each_other() -> None:
    assert {p.name for p in launch_folder().glob("*.sh")} >= {"common.sh", "stage.sh", "container.sh"}
