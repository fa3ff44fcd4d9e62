"""Launchers that are neither torchrun nor SLURM: every rank gets its place, and nobody takes itself for the only one.

The variables are those that the launchers document, and for Open MPI those that ``mpirun -n 2 env`` printed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_port.core.dist.rank import ProcessInfo
from megatron_port.core.errors import EnvironmentFault, LauncherFault
from megatron_port.run.discovery import discover
from megatron_port.run.local_ranks import run_local

Env = dict[str, str]


def openmpi(rank: int, size: int, local: int) -> Env:
    return {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % local), "OMPI_COMM_WORLD_LOCAL_SIZE": str(local),
            "OMPI_COMM_WORLD_NODE_RANK": str(rank % local), "PMIX_RANK": str(rank), "PMIX_NAMESPACE": "1581252609"}


def flux(rank: int, size: int, local: int) -> Env:
    return {"FLUX_TASK_RANK": str(rank), "FLUX_JOB_SIZE": str(size), "FLUX_TASK_LOCAL_ID": str(rank % local),
            "FLUX_JOB_NNODES": str(size // local), "FLUX_JOB_ID": "ƒ3ETxsR9H", "PMI_RANK": str(rank),
            "PMI_SIZE": str(size)}


def pals(rank: int, size: int, local: int) -> Env:
    return {"PALS_RANKID": str(rank), "PALS_LOCAL_RANKID": str(rank % local), "PALS_LOCAL_SIZE": str(local),
            "PALS_NODEID": str(rank // local), "PALS_APID": "0f5a-31", "PMI_RANK": str(rank), "PMI_SIZE": str(size)}


def jsrun(rank: int, size: int, local: int) -> Env:
    return {"JSM_NAMESPACE_RANK": str(rank), "JSM_NAMESPACE_SIZE": str(size), "LSB_JOBID": "77",
            "JSM_NAMESPACE_LOCAL_RANK": str(rank % local), "JSM_NAMESPACE_LOCAL_SIZE": str(local),
            **openmpi(rank, size, local)}


def hydra(rank: int, size: int, local: int) -> Env:
    return {"PMI_RANK": str(rank), "PMI_SIZE": str(size), "PMI_FD": "9", "MPI_LOCALRANKID": str(rank % local),
            "MPI_LOCALNRANKS": str(local)}


def mvapich(rank: int, size: int, local: int) -> Env:
    return {"MV2_COMM_WORLD_RANK": str(rank), "MV2_COMM_WORLD_SIZE": str(size),
            "MV2_COMM_WORLD_LOCAL_RANK": str(rank % local), "MV2_COMM_WORLD_LOCAL_SIZE": str(local)}


def plain(rank: int, size: int, local: int) -> Env:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank % local), "LOCAL_WORLD_SIZE": str(local)}


def deepspeed(rank: int, size: int, local: int) -> Env:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank % local), "LOCAL_SIZE": str(local)}


ALL: dict[str, Callable[[int, int, int], Env]] = {
    "openmpi": openmpi, "flux": flux, "pals": pals, "jsrun": jsrun, "pmi": hydra, "mvapich": mvapich,
    "environment": plain, "deepspeed": deepspeed,
}


def found(env: Env, **flags: object) -> ProcessInfo:
    return discover(env, hostname="n0", resolve=lambda name: ["10.0.0.1"], **flags)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ALL)
def test_every_rank_of_two_nodes_has_its_place(name: str) -> None:
    for rank in range(8):
        info = found({**ALL[name](rank, 8, 4), "MASTER_ADDR": "n0", "MASTER_PORT": "29400"})
        assert (info.rank, info.world_size) == (rank, 8)
        assert (info.local_rank, info.local_world_size) == (rank % 4, 4)
        assert (info.node_rank, info.num_nodes) == (rank // 4, 2)
        assert (info.master_addr, info.master_port) == ("n0", 29400)
        assert not info.conflicts and not info.agent_store and info.launcher == name.replace("deepspeed", "environment")


@pytest.mark.parametrize("name", ALL)
def test_on_one_node_nothing_more_is_needed(name: str) -> None:
    infos = [found(ALL[name](rank, 4, 4)) for rank in range(4)]
    assert [i.rank for i in infos] == [0, 1, 2, 3] and {i.num_nodes for i in infos} == {1}
    assert {i.master_addr for i in infos} == {"127.0.0.1"} and len({i.master_port for i in infos}) == 1


@pytest.mark.parametrize("name", ALL)
def test_several_nodes_need_a_master_and_the_message_says_how(name: str) -> None:
    env = ALL[name](5, 8, 4)
    with pytest.raises(LauncherFault, match=r"8 ranks on 2 nodes.*MASTER_ADDR.*--master-addr"):
        found(env)
    assert found(env, master_addr="n0", master_port=7000).master_addr == "n0"
    assert found(env, master_addr="n0").sources["master_addr"] == "--master-addr"


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("stale", [{"SLURM_JOB_ID": "4", "SLURM_NTASKS": "9"}, {"SLURM_STEP_ID": "batch"}])
def test_a_batch_jobs_variables_do_not_hide_the_launcher(name: str, stale: Env) -> None:
    assert found({**stale, **ALL[name](1, 2, 2)}).rank == 1


def test_a_launcher_that_gives_only_ranks_is_completed_by_the_user() -> None:
    env = {"PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2", "PALS_NODEID": "1"}
    info = found({**env, "MASTER_ADDR": "n0", "WORLD_SIZE": "4"})
    assert (info.rank, info.world_size, info.local_rank, info.num_nodes, info.launcher) == (3, 4, 1, 2, "pals")
    info = found({"PMIX_RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n0"})
    assert (info.rank, info.local_rank, info.node_rank, info.num_nodes, info.launcher) == (3, 1, 1, 2, "pmix")


def test_a_pytorchjob_has_one_rank_a_pod() -> None:
    env = {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
    info = found(env)
    assert (info.local_rank, info.local_world_size, info.node_rank, info.num_nodes) == (0, 1, 2, 3)
    assert (info.master_addr, info.master_port) == ("job-master-0", 23456)
    assert found({**env, "MASTER_ADDR": "localhost"}).local_rank == 2, "all on one host"


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 .*no RANK"),
        ({"RANK": "3"}, "nothing says how many ranks"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "where rank 0 listens.*unset RANK and WORLD_SIZE"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK=0.*set WORLD_SIZE.*unset PMIX_RANK"),
        ({"PALS_RANKID": "0"}, "PALS.*set WORLD_SIZE"),
        ({"PMI_RANK": "x", "PMI_SIZE": "2"}, 'PMI_RANK="x" is not a whole number'),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "LOCAL_RANK and LOCAL_WORLD_SIZE"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "n0"}, "LOCAL_WORLD_SIZE"),
        ({**openmpi(4, 4, 4)}, "rank 4 of 4"),
        ({"TORCHELASTIC_RUN_ID": "1", **plain(0, 1, 1), "MASTER_PORT": "1", **openmpi(1, 4, 4)},
         "Open MPI started 4 torchruns"),
        ({"TORCHELASTIC_RUN_ID": "1", **plain(0, 1, 1), "MASTER_PORT": "1", "SLURM_STEP_ID": "0",
          "SLURM_STEP_NUM_TASKS": "2"}, "srun started 2 torchruns"),
    ],
)
def test_what_says_more_than_one_is_never_taken_for_a_single_one(env: Env, says: str) -> None:
    with pytest.raises(EnvironmentFault, match=says) as caught:
        found(env)
    assert caught.value.exit_code == 3 and (caught.value.permanent or "must be below" in str(caught.value))


@pytest.mark.parametrize("env", [
    {}, {"RANK": "0"}, {"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "gold"}, openmpi(0, 1, 1), flux(0, 1, 1),
    {"LOCAL_RANK": "0"}, {"FLUX_JOB_ID": "ƒ3"}, {"PMI_FD": "3"},
])
def test_one_process_is_one_process(env: Env) -> None:
    info = found(env)
    assert (info.rank, info.world_size, info.launcher) == (0, 1, "single") and not info.conflicts


STEP = {"SLURM_JOB_ID": "4", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "2"}


def test_a_slurm_step_comes_first_and_prints_what_disagrees() -> None:
    assert not found({**STEP, "PMIX_RANK": "1", "PMI_RANK": "1", "PMI_SIZE": "2"}).conflicts, "srun --mpi=pmix"
    info = found({**STEP, "RANK": "0", "WORLD_SIZE": "16"})
    assert (info.rank, info.world_size, info.launcher) == (1, 2, "slurm")
    assert info.conflicts == [
        "RANK and WORLD_SIZE (RANK, WORLD_SIZE): rank 0 of 16 is not used, the SLURM step is: rank 1 of 2"]
    assert "WORLD_SIZE=4" in found({**STEP, "WORLD_SIZE": "4"}).conflicts[0]


def test_mpirun_in_a_step_of_one_task_is_not_one_process() -> None:
    """Open MPI starts its daemons by srun: the ranks of a node inherit a SLURM step of one task."""
    one = {**STEP, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1",
           "SLURM_STEP_TASKS_PER_NODE": "1"}
    info = found({**one, **openmpi(3, 4, 4)})
    assert (info.rank, info.world_size, info.launcher) == (3, 4, "openmpi")
    assert "the SLURM step" in info.conflicts[0] and "rank 3 of 4" in info.conflicts[0]
    assert found({**one, "PMIX_RANK": "0"}).world_size == 1, "srun --mpi=pmix with one task"


def test_torchrun_wins_where_it_says_several() -> None:
    run = {"TORCHELASTIC_RUN_ID": "1", **plain(1, 2, 2), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400",
           "GROUP_WORLD_SIZE": "1"}
    assert found({**run, **openmpi(0, 1, 1)}).conflicts == []
    info = found({**run, **openmpi(0, 2, 1)})
    assert (info.rank, info.world_size) == (1, 2) and "2 runs" in info.conflicts[0]


def test_ports_come_from_the_job_and_differ_between_jobs() -> None:
    a, b = openmpi(0, 2, 2), {**openmpi(0, 2, 2), "PMIX_NAMESPACE": "1581252610"}
    ports = {found(env).master_port for env in (a, b, openmpi(1, 2, 2))}
    assert len(ports) == 2 and all(15000 <= p < 32000 for p in ports)
    assert found(hydra(0, 2, 2)).master_port == 29500
    assert found({**a, "MASTER_PORT": "1234"}).master_port == 1234


@pytest.mark.parametrize("env", [openmpi(1, 2, 2), plain(1, 2, 2), flux(0, 2, 1), {"PMIX_RANK": "0"}])
def test_nproc_under_a_launcher_is_refused(env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EnvironmentFault, match="--nproc would start ranks twice"):
        run_local(2, lambda info: 0)


NAMES = sorted({name for make in ALL.values() for name in make(0, 2, 2)} | {"MASTER_ADDR", "SLURM_STEP_ID",
               "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"})


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), st.sampled_from(["0", "1", "2", "3", "8", "x", ""]), max_size=8))
def test_no_environment_makes_one_of_several(env: Env) -> None:
    """Whatever is set: a rank within its world, a refusal, or a single process that no size contradicts."""
    try:
        info = found(env)
    except EnvironmentFault:
        return
    assert 0 <= info.rank < info.world_size
    if info.world_size == 1:
        sizes = [n for n in env if n.endswith(("COMM_WORLD_SIZE", "JOB_SIZE", "NAMESPACE_SIZE", "PMI_SIZE"))]
        ranks = {"OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK", "FLUX_JOB_SIZE": "FLUX_TASK_RANK",
                 "JSM_NAMESPACE_SIZE": "JSM_NAMESPACE_RANK", "PMI_SIZE": "PMI_RANK",
                 "MV2_COMM_WORLD_SIZE": "MV2_COMM_WORLD_RANK"}
        in_step = env.get("SLURM_STEP_ID", "").isdigit()
        assert all(env[n] in ("", "0", "1", "x") or not env.get(ranks[n]) or in_step for n in sizes), info


def test_ranks_of_one_machine_share_its_cores() -> None:
    """OpenMP reads its variable when torch is loaded, so the command divides the cores before that (or tells torch)."""
    program = """
import os, sys
import megatron_port.cli.train as command
def rank(config, info, kept=None):
    import ctypes, torch
    loaded = [line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line]
    most = ctypes.CDLL(loaded[0]).omp_get_max_threads() if loaded else torch.get_num_threads()
    os.write(1, f"threads {torch.get_num_threads()} {most} {os.environ['OMP_NUM_THREADS']}\\n".encode())  # one write
    return 0
command.train = rank
from megatron_port.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
    cores = len(os.sched_getaffinity(0))
    clean = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTEST_ADDOPTS")}
    done = subprocess.run(
        [sys.executable, "-c", program, "train", "runs/quickstart", "--nproc", "8", "--set", "data.synthetic=true",
         "--set", "data.train=[]"],
        capture_output=True, text=True, env=clean, timeout=120, check=False)
    own = str(max(1, cores // 8))
    assert done.stdout.count(f"threads {own} {own} {own}\n") == 8, done.stdout + done.stderr
