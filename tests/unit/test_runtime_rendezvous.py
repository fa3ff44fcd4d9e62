"""The meeting of the ranks, on a store in memory with a thread per rank; addresses and ports of this host."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_port.core.config.loader import load
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist.rank import ProcessInfo
from megatron_port.core.errors import ConfigError, EnvironmentFault
from megatron_port.run import rendezvous
from megatron_port.run.discovery import SECRET, discover, holder_of_port, is_own_address, own_addresses
from megatron_port.run.rendezvous import Fingerprint, connect, installed_versions, listen, meet, places
from megatron_port.run.session import open_session

SAME = Fingerprint({"world size": "4", "torch": "2.13.0"}, {"training.steps": "10", "seed": "1"})


def rank_of(rank: int, world: int = 4, per_node: int = 2, **changes: object) -> ProcessInfo:
    """A rank of a run on hosts n0, n1, … with ``per_node`` ranks each."""
    node = rank // per_node
    info = ProcessInfo(
        rank, world, rank % per_node, per_node, node, -(-world // per_node), "n0", 1, "slurm", f"n{node}"
    )
    return replace(info, **changes)  # type: ignore[arg-type]


class Meeting:
    """Threads that meet on one store; what each raised, or None, by position."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.raised: dict[int, EnvironmentFault | None] = {}

    def run(
        self, infos: list[ProcessInfo], prints: dict[int, Fingerprint] | None = None,
        faults: dict[int, EnvironmentFault] | None = None, timeout_s: float = 20.0,
    ) -> list[str]:
        """The texts, in order of ``infos``; empty where the rank went on."""
        self.raised = {}

        def one(at: int) -> None:
            try:
                meet(infos[at], self.store, timeout_s=timeout_s, fingerprint=(prints or {}).get(at, SAME),
                     fault=(faults or {}).get(at))
                self.raised[at] = None
            except EnvironmentFault as error:
                self.raised[at] = error

        threads = [threading.Thread(target=one, args=(at,)) for at in range(len(infos))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return [str(self.raised[at] or "") for at in range(len(infos))]


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "GRACE_S", 0.5)
    monkeypatch.setattr(rendezvous, "OUTLAST_S", 1.0)


def test_ranks_that_agree_go_on() -> None:
    assert Meeting().run([rank_of(r) for r in range(4)]) == [""] * 4


def test_the_meeting_costs_five_operations_a_rank() -> None:
    """No store operation on the good path may depend on the world's size."""
    done: dict[int, list[str]] = {}

    class Counted(dist.Store):
        def __init__(self, rank: int, inner: dist.Store) -> None:
            super().__init__()
            self.log, self.inner = done.setdefault(rank, []), inner

        def _do(self, name: str, *args: object) -> object:
            self.log.append(name)
            return getattr(self.inner, name)(*args)

        def add(self, *args: object) -> object:  # type: ignore[override]
            return self._do("add", *args)

        def set(self, *args: object) -> object:  # type: ignore[override]
            return self._do("set", *args)

        def check(self, *args: object) -> object:  # type: ignore[override]
            return self._do("check", *args)

        def wait(self, *args: object) -> object:  # type: ignore[override]
            return self._do("wait", *args)

        def compare_set(self, *args: object) -> object:  # type: ignore[override]
            return self._do("compare_set", *args)

    store = dist.HashStore()
    threads = [
        threading.Thread(
            target=meet, args=(rank_of(r, 32, 8), Counted(r, store)), kwargs={"timeout_s": 20.0, "fingerprint": SAME}
        )
        for r in range(32)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    others = sorted(len(done[rank]) for rank in range(1, 32))  # rank 0 asks again while it waits
    assert others[:29] == [5] * 29 and others[-1] <= 9  # the first of its kind, and the last to come


def test_two_processes_of_one_rank_are_both_named() -> None:
    meeting = Meeting()
    infos = [rank_of(0), rank_of(1), rank_of(2, hostname="a"), rank_of(2, hostname="b")]
    said = meeting.run(infos)
    assert len(set(said)) == 1 and said[0].startswith("two processes claim rank 2 of 4: process ")
    assert re.search(r" on a\b", said[0]) and re.search(r" on b\b", said[0]) and str(os.getpid()) in said[0]


def test_versions_and_configurations_that_differ_are_named_with_ranks_and_hosts() -> None:
    other = Fingerprint({"world size": "4", "torch": "2.12.0"}, {"training.steps": "20", "seed": "1"})
    said = Meeting().run([rank_of(r) for r in range(4)], {3: other})
    assert len(set(said)) == 1
    assert said[0].startswith(
        "the ranks differ: torch 2.13.0 on n0, n1 (ranks 0-2), 2.12.0 on n1 (rank 3); "
        "training.steps = 10 on n0, n1 (ranks 0-2), 20 on n1 (rank 3). To fix:"
    )
    assert "seed" not in said[0] and "same environment" in said[0] and "same run file" in said[0]


def test_world_sizes_that_differ_are_found_at_once() -> None:
    infos = [rank_of(0), rank_of(1), rank_of(5, world=8)]
    eight = Fingerprint({**SAME.versions, "world size": "8"}, SAME.config)
    said = Meeting().run(infos, {2: eight})
    assert set(said) == {said[0]}
    assert "world size 4 on n0 (ranks 0-1), 8 on n2 (rank 5). To fix: start all ranks with one" in said[0]


def test_missing_ranks_are_named_with_their_hosts() -> None:
    nodes = tuple((f"frontier{n}", 2) for n in range(4))
    infos = [rank_of(r, 8, nodes=nodes, hostname=f"frontier{r // 2}") for r in (0, 1, 2)]
    meeting = Meeting()
    said = meeting.run(infos, timeout_s=2.0)
    assert len(set(said)) == 1
    assert said[0].startswith(
        "5 of 8 ranks did not report to n0:1 within 2 s: all of frontier2, frontier3 (ranks 4-7); "
        "rank 3 (frontier1); the others did."
    )
    assert [e.is_reporter for e in meeting.raised.values() if e] == [None] * 3  # rank 0 prints


def test_a_rank_that_comes_too_late_is_told_so() -> None:
    meeting = Meeting()
    meeting.run([rank_of(r) for r in (0, 1, 2)], timeout_s=2.0)
    said = meeting.run([rank_of(3)])
    assert said[0].startswith("rank 3 on n1 came after the others had given up: 1 of 4 ranks did not report")
    assert "rank 3 (n1)" in said[0]


def test_without_rank_0_one_other_speaks() -> None:
    """torchrun serves the store itself, so rank 0 may be the one that is missing."""
    meeting = Meeting()
    said = meeting.run([rank_of(r, agent_store=True) for r in (1, 2, 3)], timeout_s=2.0)
    assert len(set(said)) == 1 and "1 of 4 ranks did not report" in said[0] and "rank 0 (n0)" in said[0]
    assert sorted(str(e.is_reporter) for e in meeting.raised.values() if e) == ["None", "None", "True"]


def test_faults_are_told_once_and_counted() -> None:
    faults = {at: EnvironmentFault("no GPU") for at in (1, 2, 3)}
    said = Meeting().run([rank_of(r) for r in range(4)], faults=faults)
    assert len(set(said)) == 1 and said[0].endswith(": no GPU (2 more ranks brought a fault)")


def test_nodes_that_the_launcher_does_not_name_are_numbered() -> None:
    info = rank_of(0, 8, launcher="torchrun")
    assert places(info, [3, 4, 5], {0: "a", 2: "b"}) == "all of node 2 (ranks 4-5); rank 3 (b)"


def test_rank_0_must_own_the_master_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_own_address("127.0.0.1") and not is_own_address("203.0.113.7")
    with pytest.raises(EnvironmentFault, match=r"rank 0 runs on n0, and the master address 203\.0\.113\.7 .*not this"):
        listen(rank_of(0, master_addr="203.0.113.7"))


def test_rank_0_listens_on_one_interface() -> None:
    """That of the master's address, with one node and with several; not where only this host knows the address."""
    addresses = own_addresses()
    for info, bound in (
        (rank_of(0, 1, 1, master_addr="127.0.0.1", master_port=0), "127.0.0.1"),
        (rank_of(0, master_addr="127.0.0.1", master_port=0), "0.0.0.0"),
        *((rank_of(0, master_addr=a, master_port=0), a) for a in addresses),
        *((rank_of(0, 1, 1, master_addr=a, master_port=0), a) for a in addresses),
    ):
        with listen(info) as listener:
            assert listener.getsockname()[0] == bound, info


def test_the_store_of_another_secret_is_another_store() -> None:
    """Ranks of two runs that meet on one port do not read each other's keys."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    lead = rank_of(0, 1, 1, master_addr="127.0.0.1", master_port=port, secret="a1")
    store = connect(lead, 10.0)
    store.set("verdict", "mine")
    same, other, none = (
        connect(rank_of(1, master_addr="127.0.0.1", master_port=port, secret=s), 10.0) for s in ("a1", "b2", "")
    )
    assert same.get("verdict") == b"mine"
    assert not other.check(["verdict"]) and not none.check(["verdict"])
    assert "a1" not in repr(lead) and "a1" not in lead.describe()
    assert discover({SECRET: "c3"}).secret == "c3" and discover({}).secret == ""


def test_a_taken_port_names_its_holder() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(EnvironmentFault, match=rf"port {port} .* is taken on n0 by (a )?process \S+"):
            listen(rank_of(0, 1, 1, master_addr="127.0.0.1", master_port=port))
    assert holder_of_port(port) == ""


def test_the_holder_is_found_in_the_systems_tables(tmp_path: Path) -> None:
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    row = "   {}: 0100007F:{:04X} 00000000:0000 {} 00000000:00000000 00:00000000 00000000  4242 0 {} 1\n"
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text(head + row.format(0, 7000, "01", 11) + row.format(1, 7000, "0A", 12))
    assert holder_of_port(7000, tmp_path) == "a process of user 4242" and holder_of_port(7001, tmp_path) == ""
    for pid, inode in ((40, 11), (41, 12)):
        (tmp_path / str(pid) / "fd").mkdir(parents=True)
        (tmp_path / str(pid) / "fd" / "3").symlink_to(f"socket:[{inode}]")
        (tmp_path / str(pid) / "cmdline").write_bytes(b"python\0serve.py\0")
    assert holder_of_port(7000, tmp_path) == "process 41 (python serve.py)"


@pytest.mark.parametrize(
    ("address", "says"),
    [("127.0.0.1", "connection refused"), ("nowhere.invalid", "cannot be resolved")],
)
def test_a_master_that_does_not_answer(address: str, says: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, not listening
        info = rank_of(2, master_addr=address, master_port=free.getsockname()[1])
        with pytest.raises(EnvironmentFault, match=rf"rank 2 on n1 could not reach the master at .*{says}") as caught:
            connect(info, 0.3)
        assert caught.value.is_reporter is True  # the first rank of its node
        with pytest.raises(EnvironmentFault) as caught:
            connect(replace(info, local_rank=1), 0.3)
        assert caught.value.is_reporter is False


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that accepts and says nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_another_service_on_the_masters_port(silent_port: int) -> None:
    with pytest.raises(EnvironmentFault, match="could not reach the master"):
        connect(rank_of(1, master_addr="127.0.0.1", master_port=silent_port), 0.5)


def test_a_fingerprint_survives_the_store_and_sees_every_key() -> None:
    config = RunConfig()
    mine = Fingerprint.of(8, config)
    assert Fingerprint.from_json(mine.to_json()) == mine and mine.digest == Fingerprint.of(8, RunConfig()).digest
    assert mine.digest != Fingerprint.of(4, config).digest != Fingerprint.of(4).digest
    assert mine.digest != Fingerprint.of(8, replace(config, seed=config.seed + 1)).digest
    assert list(installed_versions()) == ["megatron_port", "Python", "torch", "deepspeed"]
    assert installed_versions()["torch"][0].isdigit()


def test_a_world_that_the_layout_cannot_use_is_the_environments_fault() -> None:
    """The configuration alone is right: exit 3. One that is wrong for any world: exit 2."""
    fits_two = load("runs/quickstart", ["layout.tensor_parallel_size=2"]).config
    info = rank_of(0, 3, 3, launcher="slurm", sources={"world_size": "SLURM_NTASKS"})
    with pytest.raises(EnvironmentFault, match=r"slurm started 3 \(SLURM_NTASKS\).*but the world has 3"), \
            open_session(fits_two, info):
        pass
    wrong = load("runs/quickstart", ["model.num_attention_heads=7"]).config
    with pytest.raises(ConfigError), open_session(wrong, info):
        pass
