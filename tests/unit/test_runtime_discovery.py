"""Discovery as a pure function of the environment, and the SLURM texts it reads."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_port.core.errors import EnvironmentFault
from megatron_port.run.discovery import discover, is_loopback
from megatron_port.run.launchers import expand_hosts, expand_tasks, in_step, same_host, step_port

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29400",
    "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "3",
}
SLURM = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "12", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "8,4",
    "SLURM_STEP_NODELIST": "frontier[00007-00008]", "SLURM_SUBMIT_HOST": "login3", "SLURM_NTASKS": "99",
}


def known(name: str) -> list[str]:
    """A resolver for tests."""
    table = {"node1": ["10.0.0.1"], "frontier00007": ["10.0.0.7"], "login3": ["10.0.1.3"], "here": ["127.0.1.1"]}
    if name not in table:
        raise OSError(f"unknown host {name}")
    return table[name]


def found(env: dict[str, str], **options: object):
    return discover(env, hostname=str(options.pop("hostname", "node2")), resolve=known, **options)  # type: ignore[arg-type]


def test_a_process_without_launcher_is_alone() -> None:
    info = found({})
    assert (info.rank, info.world_size, info.local_rank, info.num_nodes, info.launcher) == (0, 1, 0, 1, "single")
    assert not info.conflicts and info.sources["rank"] == "single process"


def test_torchrun_is_read_and_beats_slurm() -> None:
    info = found({**SLURM, **TORCHRUN})
    assert (info.rank, info.world_size, info.local_rank, info.local_world_size) == (5, 8, 1, 4)
    assert (info.node_rank, info.num_nodes, info.master_addr, info.master_port) == (1, 2, "node1", 29400)
    assert info.agent_store and info.attempt == "3" and info.launcher == "torchrun"
    assert info.sources["rank"] == "RANK" and info.sources["master_addr"] == "MASTER_ADDR"


def test_a_slurm_step_is_read() -> None:
    info = found(SLURM)
    assert (info.rank, info.world_size, info.local_rank, info.local_world_size) == (9, 12, 1, 4)
    assert (info.node_rank, info.num_nodes, info.master_addr) == (1, 2, "frontier00007")
    assert info.master_port == step_port(SLURM) and not info.conflicts and not info.agent_store
    assert info.sources["world_size"] == "SLURM_STEP_NUM_TASKS" and "first host" in info.sources["master_addr"]


@pytest.mark.parametrize("step", ["", "batch", "4294967291", "4294967290"])
def test_a_batch_script_or_interactive_shell_is_no_step(step: str) -> None:
    env = {**SLURM, "SLURM_STEP_ID": step}
    assert not in_step(env) and found(env).launcher == "single"
    assert "SLURM_NTASKS=99, but no srun" in found(env).conflicts[0]


def test_an_exported_master_is_a_conflict_under_slurm() -> None:
    info = found({**SLURM, "MASTER_ADDR": "login3", "MASTER_PORT": "1234"})
    assert info.master_addr == "frontier00007"
    assert len(info.conflicts) == 2 and "login3" in info.conflicts[0] and "1234" in info.conflicts[1]
    assert not found({**SLURM, "MASTER_ADDR": "frontier00007.olcf.gov"}).conflicts


def test_flags_win_and_say_so() -> None:
    info = found({**SLURM, "MASTER_ADDR": "login3"}, master_addr="node1", master_port=7777)
    assert (info.master_addr, info.master_port) == ("node1", 7777)
    assert info.sources["master_addr"] == "--master-addr"
    assert info.conflicts == ["--master-addr node1 is used, not frontier00007 (first host of the step's node list)"]
    own = discover(SLURM, hostname="x", resolve=lambda name: ["10.0.0.7"], master_addr="10.0.0.7", master_port=7777)
    assert own.master_addr == "10.0.0.7" and own.conflicts == []


@pytest.mark.parametrize(
    ("env", "flags", "says"),
    [
        (SLURM, {"master_addr": "login3"}, "submitted from.*--master-addr frontier00007"),
        (SLURM, {"master_addr": "localhost"}, "loopback.*2 nodes"),
        (SLURM, {"master_addr": "127.0.0.5"}, "loopback"),
        (SLURM, {"master_addr": "nowhere"}, "nowhere .*cannot be resolved on node2"),
        (SLURM, {"master_addr": "here"}, "127.0.1.1 on node2: loopback"),
        ({**TORCHRUN, "MASTER_ADDR": "localhost"}, {}, "MASTER_ADDR. is a loopback"),
        ({**TORCHRUN, "RANK": "8"}, {}, "rank 8 of 8"),
        ({**TORCHRUN, "RANK": "x"}, {}, 'RANK="x" is not a whole number'),
        ({k: v for k, v in TORCHRUN.items() if k != "WORLD_SIZE"}, {}, "WORLD_SIZE is not set"),
        ({k: v for k, v in SLURM.items() if "NODELIST" not in k}, {}, "pass --master-addr"),
        ({**SLURM, "SLURM_NODEID": "2"}, {}, "has 2 nodes"),
        ({**SLURM, "SLURM_STEP_NODELIST": "a[1-"}, {}, "not closed"),
        (SLURM, {"master_port": 70000}, "not a port"),
    ],
)
def test_what_cannot_work_is_refused(env: dict[str, str], flags: dict[str, object], says: str) -> None:
    with pytest.raises(EnvironmentFault, match=says) as caught:
        found(env, **flags)
    assert caught.value.exit_code == 3


def test_what_is_fine_is_not_refused() -> None:
    # A submit host that is one of the nodes; a host that maps its own name to loopback; one node on loopback.
    assert found({**SLURM, "SLURM_SUBMIT_HOST": "frontier00007"}).master_addr == "frontier00007"
    assert found({**TORCHRUN, "MASTER_ADDR": "here"}, hostname="here").master_addr == "here"
    one = {**SLURM, "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "12"}
    assert found(one).master_addr == "127.0.0.1"


def test_ports_differ_by_job_step_and_restart() -> None:
    envs = [{**SLURM, **change} for change in ({}, {"SLURM_JOB_ID": "4712"}, {"SLURM_STEP_ID": "1"},
                                               {"SLURM_RESTART_COUNT": "1"})]
    ports = {step_port(env) for env in envs}
    assert len(ports) == 4 and all(1024 < p < 32768 for p in ports)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("frontier[00001-00003,00010],login1",
         ["frontier00001", "frontier00002", "frontier00003", "frontier00010", "login1"]),
        ("a", ["a"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("r[1-2]n[3-4]-ib", ["r1n3-ib", "r1n4-ib", "r2n3-ib", "r2n4-ib"]),
        ("", []),
    ],
)
def test_node_lists_expand(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["a[1-", "a]1[", "a[x-2]", "a[3-2]", "a[[1]]", "a[1,]"])
def test_bad_node_lists_are_refused(text: str) -> None:
    with pytest.raises(EnvironmentFault, match="node list"):
        expand_hosts(text)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9999), st.integers(0, 40)), min_size=1, max_size=5), st.integers(1, 5))
def test_ranges_keep_their_order_and_zeros(ranges: list[tuple[int, int]], width: int) -> None:
    text = ",".join(f"{a:0{width}d}-{a + n:0{width}d}" for a, n in ranges)
    assert expand_hosts(f"n[{text}]") == [f"n{i:0{width}d}" for a, n in ranges for i in range(a, a + n + 1)]


def test_task_counts_expand() -> None:
    assert expand_tasks("8(x3),4") == [8, 8, 8, 4]
    with pytest.raises(EnvironmentFault, match="not of the form"):
        expand_tasks("8x3")


def test_host_names() -> None:
    assert same_host("node1", "NODE1.site.org") and not same_host("node1.a.org", "node1.b.org")
    assert is_loopback("127.9.9.9") and is_loopback("::1") and is_loopback("localhost") and is_loopback("0.0.0.0")
    assert is_loopback("::ffff:127.0.0.1") and not is_loopback("10.0.0.1") and not is_loopback("node1")
