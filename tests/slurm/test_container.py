"""Ranks in real containers (podman, from the distribution) on a real SLURM, whose tools exist on the hosts only."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import losses, settings, train_here
from test_launch import SHORT, Runs, runs  # noqa: F401 - runs is a fixture
from test_record import Login

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


def usable(folder: Path) -> str:
    """Why podman cannot start a container here, or nothing."""
    if not shutil.which("podman") or not shutil.which("runc"):
        return "no podman and runc here (apt-get install --no-install-recommends podman runc)"
    conf = folder / "containers.conf"
    conf.write_text(CONTAINERS)
    done = subprocess.run(
        ["podman", "run", "--rm", "--network=host", "--ipc=host", "--pid=host", *LIMITS, "-v", "/usr:/usr:ro",
         "--rootfs", str(root_of(folder / "probe")), "/usr/bin/true"], capture_output=True, text=True, check=False,
        env={**os.environ, "CONTAINERS_CONF": str(conf)},
    )
    return f"podman starts nothing here: {done.stderr.strip()[-300:]}" if done.returncode else ""


def test_a_job_in_containers_without_slurms_tools(runs: Runs) -> None:  # noqa: F811
    (runs.folder / "probe").mkdir()
    reason = usable(runs.folder)
    if reason:
        pytest.skip(reason)
    root, prefix = root_of(runs.folder), Path(sys.base_prefix).resolve()
    places = ("/usr/lib", "/usr/lib64", str(prefix), sys.prefix)
    mounts = [f"{place}:{place}:ro" for place in places]
    real = str(Path(sys.prefix).resolve())
    mounts += [f"{real}:{real}:ro"] if real != sys.prefix else []
    login = Login(runs, nodes=2, training__steps=60)
    quoted = [", ".join(f'"{word}"' for word in words) for words in (mounts, [*LIMITS, "--rootfs"])]
    with login.file.open("a") as stream:
        stream.write(f'container = "podman"\ncontainer_image = "{root}"\ncontainer_mounts = [{quoted[0]}]\n'
                     f'container_options = [{quoted[1]}]\ncontainer_python = "{sys.executable}"\n')
    os.environ["CONTAINERS_CONF"] = str(runs.folder / "containers.conf")
    try:
        job = login.job()
    finally:
        del os.environ["CONTAINERS_CONF"]
    runs.wait_for_step(job, 10)
    runs.cluster.run(["scancel", "--batch", "--signal=USR1", str(job)])
    record = runs.wait(job, "COMPLETED")
    log = runs.log()
    assert int(record["Restarts"]) == 1 and "is queued again" in log and "resumed from" in log, log
    assert losses(runs.run_folder) == train_here(2, *settings(**SHORT, training__steps=60))
