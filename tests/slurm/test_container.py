"""Ranks in real containers (podman, apptainer, pyxis with enroot) on a real SLURM, whose tools exist on the hosts only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from jobs import losses, settings, train_here
from test_launch import SHORT, Runs, runs  # noqa: F401 - runs is a fixture
from test_record import Login

from megatron_port.core.config.machine import ClusterConfig

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

CONTAINERS = '[engine]\nruntime = "runc"\n[containers]\ndefault_ulimits = []\n'
LIMITS = ("--ulimit=nofile=1024:1024", "--ulimit=nproc=4096:4096")


def root_of(folder: Path) -> Path:
    """A root file system without programs: no scontrol, no srun, no sh."""
    root = folder / "root"
    for name in ("proc", "sys", "dev", "tmp", "etc", "usr", "root", "run", "var"):
        (root / name).mkdir(parents=True)
    for name in ("lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    return root


def usable(folder: Path, runtime: str) -> str:
    """Why podman, or podman-hpc on top of it, cannot start a container here, or nothing."""
    if not shutil.which("podman") or not shutil.which("runc"):
        return "no podman and runc here (apt-get install --no-install-recommends podman runc)"
    if not shutil.which(runtime):
        return f"no {runtime} here (pip install {runtime})"
    conf = folder / "containers.conf"
    conf.write_text(CONTAINERS)
    done = subprocess.run(
        [runtime, "run", "--rm", "--network=host", "--ipc=host", "--pid=host", *LIMITS, "-v", "/usr:/usr:ro",
         "--rootfs", str(root_of(folder / "probe")), "/usr/bin/true"], capture_output=True, text=True, check=False,
        env={"USER": "root", **os.environ, "CONTAINERS_CONF": str(conf)},  # podman-hpc asks for it
    )
    return f"{runtime} starts nothing here: {done.stderr.strip()[-300:]}" if done.returncode else ""


def apptainer_usable(folder: Path) -> str:
    """Why apptainer cannot start a container from a .sif here, or nothing. Needs no privilege (--userns)."""
    if not shutil.which("apptainer"):
        return "no apptainer here (Debian's sid has it; with squashfuse it mounts an image, else it unpacks it)"
    image = folder / "probe.sif"
    steps = (["build", str(image), str(root_of(folder / "probe"))],
             ["exec", "--userns", "--bind", "/usr:/usr:ro", str(image), "/usr/bin/true"])
    for words in steps:
        done = subprocess.run(["apptainer", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            return f"apptainer {words[0]} fails here: {done.stderr.strip()[-300:]}"
    return ""


PLUGINS = [Path(place) / "spank_pyxis.so" for place in (
    os.environ.get("PYXIS", "/nowhere"), "/usr/local/lib/slurm", "/usr/lib/x86_64-linux-gnu/slurm")]


def pyxis_usable(runs: Runs) -> str:  # noqa: F811
    """Give the cluster the plug-in; why that is not possible here, or nothing.

    enroot.conf must have all paths below /tmp, which each host has for itself. PYXIS: the plug-in's folder.
    """
    plugin = next((path for path in PLUGINS if path.is_file()), None)
    if plugin is None or not shutil.which("enroot") or not shutil.which("mksquashfs"):
        return "no enroot, mksquashfs and spank_pyxis.so here (NVIDIA's enroot and pyxis, from source)"
    own = f"{ClusterConfig().local_disk}/pyxis-of-tests"
    (runs.cluster.base / "etc" / "slurm" / "plugstack.conf").write_text(f"required {plugin} runtime_path={own}\n")
    for name in runs.cluster.nodes:
        runs.cluster.on_node(name, ["mkdir", "-p", own])
    return ""


def image_of(runtime: str, runs: Runs) -> tuple[Path, tuple[str, ...], dict[str, str]]:  # noqa: F811
    """Image, options and environment of a job; skipped where the runtime does not work."""
    (runs.folder / "probe").mkdir()
    reason = {"apptainer": lambda: apptainer_usable(runs.folder), "pyxis": lambda: pyxis_usable(runs)}.get(
        runtime, lambda: usable(runs.folder, runtime))()
    if reason:
        pytest.skip(reason)
    root = root_of(runs.folder)
    if runtime.startswith("podman"):
        return root, (*LIMITS, "--rootfs"), {"CONTAINERS_CONF": str(runs.folder / "containers.conf")}
    for name in ("resolv.conf", "hosts", "localtime", "group"):
        (root / "etc" / name).touch()  # which they mount the host's over
    if runtime == "pyxis":
        image = runs.folder / "image.sqsh"
        (root / "usr" / "bin").mkdir()
        shutil.copy("/bin/sh", root / "usr" / "bin" / "sh")  # enroot runs its start-up script in it
        (root / "bin").symlink_to("usr/bin")
        subprocess.run(["mksquashfs", str(root), str(image)], capture_output=True, check=True)
        return image, (), {}
    image = runs.folder / "image.sif"
    subprocess.run(["apptainer", "build", str(image), str(root)], capture_output=True, check=True)
    return image, ("--userns",), {"STAGE": "image"}


@pytest.fixture
def no_plugin(whole_cluster: Cluster) -> Iterator[None]:
    """Whatever a test gives the cluster, the next one finds it without."""
    yield
    (whole_cluster.base / "etc" / "slurm" / "plugstack.conf").unlink(missing_ok=True)


@pytest.mark.usefixtures("no_plugin")
@pytest.mark.parametrize("runtime", ["podman", "podman-hpc", "apptainer", "pyxis"])
def test_a_job_in_containers_without_slurms_tools(runs: Runs, runtime: str) -> None:  # noqa: F811
    """A root file system without programs. apptainer's image is a .sif that is copied to each node first (sbcast)."""
    image, options, env = image_of(runtime, runs)
    prefix, real = Path(sys.base_prefix).resolve(), str(Path(sys.prefix).resolve())
    places = dict.fromkeys(("/usr/lib", "/usr/lib64", str(prefix), sys.prefix, real))
    quoted = [", ".join(f'"{word}"' for word in words) for words in ([f"{p}:{p}:ro" for p in places], options)]
    login = Login(runs, nodes=2, training__steps=60)
    with login.file.open("a") as stream:
        stream.write(f'container = "{runtime}"\ncontainer_image = "{image}"\ncontainer_mounts = [{quoted[0]}]\n'
                     f'container_options = [{quoted[1]}]\ncontainer_python = "{sys.executable}"\n'
                     f'local_disk = "{runs.cluster.local}"\n')
    job = login.job(**env)
    runs.wait_for_step(job, 10)
    runs.cluster.run(["scancel", "--batch", "--signal=USR1", str(job)])
    record = runs.wait(job, "COMPLETED")
    log = runs.log()
    assert int(record["Restarts"]) == 1 and "is queued again" in log and "resumed from" in log, log
    assert log.count("staging ") == (2 if runtime == "apptainer" else 0), log
    assert losses(runs.run_folder) == train_here(2, *settings(**SHORT, training__steps=60))
