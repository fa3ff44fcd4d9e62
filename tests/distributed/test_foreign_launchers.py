"""Two real processes with the variables of each foreign launcher: one job of two ranks, or exit 3; never two runs.

The processes are forked from one interpreter that has imported torch; each finds its place as `megatron-port train`
does, meets the other in rank 0's store, and sums its rank with it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_runtime_launchers import ALL, Env

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json, os, sys, tempfile
import torch, torch.distributed as dist
from megatron_port.core.errors import PortError
from megatron_port.run import rendezvous as process_group
from megatron_port.run.discovery import discover

def rank(env, out):
    for name in list(os.environ):
        if name not in ("PATH", "HOME"):
            del os.environ[name]
    os.environ.update(env)
    try:
        info = discover()
        if info.world_size == 1:
            os.write(out, b"alone"); os._exit(0)
        group = process_group.start(info, backend="gloo", timeout_s=60.0, group_timeout_s=60.0)
        total = torch.tensor([info.rank + 1]); dist.all_reduce(total)
        os.write(out, f"{info.rank} of {info.world_size}: {int(total)}".encode())
        process_group.stop(group)
        os._exit(0)
    except PortError as error:
        os.write(out, f"refused: {error}".encode()); os._exit(error.exit_code)

results = {}
for name, envs in json.load(sys.stdin).items():
    children = []
    for env in envs:
        source, sink = os.pipe()
        pid = os.fork()
        if pid == 0:
            rank(env, sink)
        os.close(sink)
        children.append((pid, source))
    results[name] = []
    for pid, source in children:
        said = b"".join(iter(lambda: os.read(source, 65536), b"")).decode()
        results[name].append([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said])
print(json.dumps(results))
"""


def pair(*envs: Env) -> list[Env]:
    return list(envs)


MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
            "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}
"""As a JobSet's pod has them: Indexed jobs start torchrun, which starts the ranks."""
WHOLE = {
    **{name: [make(rank, 2, 2) for rank in range(2)] for name, make in ALL.items() if name not in ("deepspeed", "pmi")},
    "deepspeed launcher": [{**ALL["deepspeed"](rank, 2, 2), **MASTER, "MASTER_PORT": "29513"} for rank in range(2)],
    "hydra": [{**ALL["pmi"](rank, 2, 2), "MASTER_PORT": "29514"} for rank in range(2)],
    "PyTorchJob": [{"RANK": str(r), "WORLD_SIZE": "2", **MASTER, "PET_NNODES": "2"} for r in range(2)],
    "JobSet, torchrun": [{**TORCHRUN, "RANK": str(r), "LOCAL_RANK": str(r), "JOB_COMPLETION_INDEX": "0"}
                         for r in range(2)],
    "mpirun in a step of one task": [
        {**ALL["openmpi"](r, 2, 2), "PMIX_NAMESPACE": "5", "SLURM_JOB_ID": "4", "SLURM_STEP_ID": "0",
         "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "1",
         "SLURM_STEP_NUM_NODES": "1",
         "SLURM_STEP_TASKS_PER_NODE": "1"} for r in range(2)],
}
PARTIAL = {
    "PMIx alone": [{"PMIX_RANK": str(r)} for r in range(2)],
    "PALS without a size": [{"PALS_RANKID": str(r), "PALS_LOCAL_RANKID": str(r)} for r in range(2)],
    "MPICH without local ranks": [{"PMI_RANK": str(r), "PMI_SIZE": "2"} for r in range(2)],
    "a JobSet without torchrun": [{"RANK": str(r), "WORLD_SIZE": "2"} for r in range(2)],
    "WORLD_SIZE alone": [{"WORLD_SIZE": "2"}, {"WORLD_SIZE": "2"}],
    "Flux on two nodes without a master": [
        {"FLUX_TASK_RANK": str(r), "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "0", "FLUX_JOB_NNODES": "2"}
        for r in range(2)],
    "two torchruns of one by Open MPI": [
        {**ALL["openmpi"](r, 2, 2), **TORCHRUN, "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0",
         "LOCAL_WORLD_SIZE": "1"} for r in range(2)],
}


@pytest.fixture(scope="module")
def results() -> dict[str, list[tuple[int, str]]]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps({**WHOLE, **PARTIAL}), text=True, capture_output=True,
        check=False, timeout=300, cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: [(code, said) for code, said in found] for name, found in json.loads(done.stdout).items()}


@pytest.mark.parametrize("name", WHOLE)
def test_two_processes_are_one_job(results: dict[str, list[tuple[int, str]]], name: str) -> None:
    assert results[name] == [(0, "0 of 2: 3"), (0, "1 of 2: 3")]


@pytest.mark.parametrize("name", PARTIAL)
def test_two_processes_that_cannot_meet_exit_3(results: dict[str, list[tuple[int, str]]], name: str) -> None:
    for code, said in results[name]:
        assert code == 3 and said.startswith("refused: "), (code, said)


ONE = """
import torch, torch.distributed as dist
from megatron_port.run import rendezvous as process_group
from megatron_port.run.discovery import discover

info = discover()
group = process_group.start(info, backend="gloo", timeout_s=60.0, group_timeout_s=60.0)
total = torch.tensor([info.rank + 1])
dist.all_reduce(total)
print("found", info.launcher, info.rank, info.world_size, int(total), flush=True)
process_group.stop(group)
"""
REAL = {
    "openmpi": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2"],
    "pmi": ["mpiexec.hydra", "-n", "2"],
    "flux": ["flux", "start", "-s", "1", "flux", "run", "-N", "1", "-n", "2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", REAL)
def test_two_ranks_of_a_real_launcher(launcher: str, tmp_path: Path) -> None:
    """Debian's openmpi-bin and hydra; Flux from source (test_flux.py runs more of it)."""
    command = REAL[launcher]
    if not shutil.which(command[0]):
        pytest.skip(f"no {command[0]} here")
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | {
        name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH", "OPAL_PREFIX") if name in os.environ}
    program = tmp_path / "one.py"
    program.write_text(ONE)
    command = [*command, sys.executable, str(program)]
    done = subprocess.run(command, env=env, text=True, capture_output=True, timeout=200, check=False)
    found = sorted(line for line in done.stdout.splitlines() if line.startswith("found"))
    assert found == [f"found {launcher} {rank} 2 3" for rank in range(2)], done.stdout + done.stderr
