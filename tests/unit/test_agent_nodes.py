"""What the agent of several nodes decides, and what it hears over its connections; its nodes are names in a list."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_port import __version__
from megatron_port.core.dist.rank import ProcessInfo
from megatron_port.run import local_ranks, node_ranks, relay
from megatron_port.run.agent import Agent, Kept, _Rank
from megatron_port.run.agent_link import END, HUNG, LEAVE, LOST, RUNNING, AgentLink, Restart
from megatron_port.run.launchers import AGENT_VARIABLE, LOCAL_RANK_VARIABLE
from megatron_port.run.local_ranks import Meeting, free_port, process_info
from megatron_port.run.node_ranks import NodeRanks
from megatron_port.run.processes import end_connections
from megatron_port.run.relay import Door, Lines, _proof


class Fake:
    """A node that notes what it is to do."""

    def __init__(self, name: str) -> None:
        self.hostname, self.address, self.port, self.done = name, f"10.0.0.{name[1:]}", 100 + int(name[1:]), []
        self.meeting: Any = None
        self.recovery: Any = None
        self.quiet_s = 0.0

    def start(self, new: Sequence[int], kept: Sequence[int], meeting: Meeting, recovery: Restart | None) -> None:
        self.done.append(("start", list(new), list(kept)))
        self.meeting, self.recovery = meeting, recovery

    def tell(self, local: int, kind: str, **values: Any) -> None:
        self.done.append((kind, local, *values.values()))

    def send_signal(self, number: int, locals_: Sequence[int] | None = None) -> None:
        self.done.append(("signal", number, locals_))

    def poll(self) -> None:
        pass

    def took(self) -> list[Any]:
        done, self.done = self.done, []
        return done


class Run:
    """An agent and its nodes, two ranks on each; ``step`` is one turn of its loop."""

    def __init__(self, nodes: int, *, places: int = 0, fits: int = 0) -> None:
        self.failed: list[str] = []
        kept = Kept(Meeting(0, "", 0, ("",) * (places or nodes), 2), lambda info, kept: 0, lambda: None,
                    lambda world: world <= fits, self.failed.append)
        self.agent, self.nodes = Agent(kept, selectors.DefaultSelector()), [Fake(f"n{i}") for i in range(nodes)]
        for node in self.nodes:
            self.agent.joined(node)
        self.agent._fill_places()
        self.agent._start_missing()
        for node in self.nodes:
            node.took()

    def rank(self, rank: int) -> _Rank:
        return next(r for r in self.agent._ranks if r.rank == rank)

    def tell(self, rank: int, kind: str, **values: Any) -> None:
        told: dict[str, dict[str, Any]] = {
            RUNNING: {"step": 1, "epoch": 1}, LOST: {"why": "x", "victim": True, "step": 1, "damaged_from": -1}}
        found = self.rank(rank)
        self.agent.on_told(found.node, found.local, {"kind": kind, **told.get(kind, {}), **values})

    def end(self, rank: int, code: int = -9) -> None:
        found = self.rank(rank)
        self.agent.on_ended(found.node, found.local, code)

    def trains(self, step: int = 1) -> Run:
        for rank in sorted(r.rank for r in self.agent._ranks):
            self.tell(rank, RUNNING, step=step)
        return self

    def step(self, *, after: float = 0.0) -> bool:
        """Whether the next start has begun."""
        now = time.monotonic() + after
        began = bool(self.agent._since) and self.agent._gathered(now) and not self.agent._too_often()
        if began:
            self.agent._start_missing()
        else:
            self.agent._judge(now)
        return began


def test_a_rank_that_is_being_ended_has_no_place_in_the_next_start() -> None:
    """It left its step at last, while its end was on the way to it."""
    run = Run(2).trains()
    run.end(0)
    for rank in (1, 2):
        run.tell(rank, LOST)
    assert not run.step(after=11.0) and run.nodes[1].took()[-1] == ("signal", signal.SIGKILL, [1])
    run.tell(3, LOST)
    assert not run.step(), "its process is about to end"
    run.end(3)
    assert run.step()
    assert run.nodes[1].took()[-1] == ("start", [1], [0]) and run.nodes[0].took()[-1] == ("start", [0], [1])


def test_ranks_that_have_left_their_step_are_not_hung() -> None:
    run = Run(2).trains()
    run.tell(3, LOST)
    run.tell(0, HUNG, ranks=[3])
    assert not run.agent._since and not run.nodes[1].took()
    run.tell(0, HUNG, ranks=[1, 3])
    assert ("signal", signal.SIGKILL, [1]) in run.nodes[0].took()
    assert [done[0] for done in run.nodes[1].took()] == [LEAVE], "rank 2's"
    run.tell(0, HUNG, ranks=[0])
    assert ("signal", signal.SIGKILL, [0]) not in run.nodes[0].took(), "all wait in a recovery"


@pytest.mark.parametrize(("hung", "quiet", "ended"), [
    ([*range(6)], {1: 3.0}, [2, 3]), ([*range(6)], {1: 2.0}, [*range(6)]), ([0, 1], {1: 3.0}, [0, 1]),
])
def test_where_all_hang_a_node_that_is_not_heard_is_the_cause(
    hung: list[int], quiet: dict[int, float], ended: list[int]
) -> None:
    """Its cable is out, and all wait for it in one operation."""
    run = Run(3).trains()
    for place, seconds in quiet.items():
        run.nodes[place].quiet_s = seconds
    run.tell(5, HUNG, ranks=hung)
    struck = [2 * place + done[2][0] for place, node in enumerate(run.nodes) for done in node.took()
              if done[:2] == ("signal", signal.SIGKILL)]
    assert struck == ended


def test_ranks_are_told_which_nodes_not_to_wait_for() -> None:
    run = Run(3, places=2).trains()
    run.end(1)
    assert run.nodes[0].took()[0] == (LEAVE, 0, [])
    run.agent.gone(run.nodes[1], "silent")
    assert run.nodes[0].took()[-1][2] == ["10.0.0.1"]
    run.tell(0, LOST, step=7)
    assert run.step()
    assert run.nodes[2].meeting.hosts == ("n0", "n2") and run.nodes[2].meeting.node == 1
    assert run.nodes[0].meeting.port == 100 and run.nodes[0].meeting.address == "10.0.0.0"
    assert run.nodes[0].recovery.step == 7 and run.nodes[0].recovery.first_epoch == 1
    run.trains(7)
    assert run.agent._lost_nodes == [] and run.agent._lost == []


def test_ranks_have_new_numbers_on_fewer_nodes() -> None:
    """Those on the nodes that the layout leaves out end, and their node is a spare one."""
    run = Run(4, fits=4).trains()
    run.agent.gone(run.nodes[1], "silent")
    for rank in (0, 1, 4, 5, 6, 7):
        run.tell(rank, LOST)
    assert not run.step() and ("signal", signal.SIGKILL, [0]) in run.nodes[3].took()
    run.end(6)
    run.end(7)
    assert run.step() and [r.rank for r in run.agent._ranks] == [0, 1, 2, 3]
    assert run.nodes[2].took()[-1] == ("start", [], [0, 1]) and run.nodes[2].meeting.node == 1
    assert not run.failed and run.nodes[3] in run.agent.nodes


def test_a_damaged_states_copies_are_not_used_again_before_all_train() -> None:
    run = Run(3, places=2).trains()
    run.tell(2, LOST, victim=False, damaged_from=6)
    run.tell(3, LOST, victim=False, damaged_from=8)
    run.tell(0, LOST)
    run.tell(1, LOST)
    assert not run.step(after=2.0)  # they raise what they met
    run.end(2, 6)
    run.end(3, 6)
    assert run.step() and run.nodes[0].recovery.below == 6
    assert run.nodes[2].took() == [("start", [0, 1], [])], "instead of the node where it happened"
    run.tell(0, RUNNING)
    run.end(1)
    run.tell(0, LOST)
    run.end(2)
    run.end(3)
    assert run.step() and run.nodes[0].recovery.below == 6, "they never trained"
    run.trains()
    run.end(0)
    for rank in (1, 2, 3):
        run.tell(rank, LOST)
    assert run.step() and run.nodes[0].recovery.below == -1


@pytest.mark.parametrize("nodes", [1, 2])
def test_copies_of_a_damaged_state_are_not_left_to_the_next_start(nodes: int) -> None:
    """Of several nodes: on one the rank itself has dropped its newest, which is the only one."""
    run = Run(nodes).trains()
    run.tell(0, LOST, victim=False, damaged_from=6)
    assert not run.step(after=20.0)
    run.end(0, 2)
    for rank in range(1, 2 * nodes):
        run.tell(rank, LOST)
    run.agent._give_up(3, "too often")
    assert run.agent.lets_go is (nodes == 2)
    assert not Run(2).agent.lets_go, "it never trained"
    run = Run(nodes).trains()
    for rank in range(2 * nodes):
        run.tell(rank, LOST, victim=False, damaged_from=6, keeps=True)
    assert not run.step(after=20.0) and not run.agent.lets_go, "they have dropped it, and cannot save the one before"


def test_a_node_that_goes_while_the_run_ends_is_no_loss() -> None:
    run = Run(2).trains()
    run.agent.signalled(signal.SIGUSR1)
    run.agent._pass_on()
    run.agent.gone(run.nodes[1], "silent")
    assert not run.agent._since and run.agent._code == 3 and run.failed == ["node n1 is lost: silent"]
    run.agent.gone(run.nodes[1], "silent")
    assert len(run.failed) == 1


def test_a_signal_that_comes_from_every_node_is_one_and_a_second_one_is_a_second() -> None:
    run = Run(2)
    agent = run.agent
    agent.signalled(signal.SIGTERM, here=True)
    agent.signalled(signal.SIGTERM)
    assert agent._signals == [signal.SIGTERM]
    agent.signalled(signal.SIGTERM, here=True)
    assert len(agent._signals) == 2
    agent.signalled(signal.SIGTERM)
    assert len(agent._signals) == 2
    agent.signalled(signal.SIGUSR1)
    agent.signalled(signal.SIGUSR1, here=True)
    assert len(agent._signals) == 3
    agent._signalled = (signal.SIGUSR1, time.monotonic() - 4.0, False)
    agent.signalled(signal.SIGUSR1)
    assert len(agent._signals) == 4


# Connections.

class Served:
    """A door, and the agent that it is of."""

    def __init__(self) -> None:
        self.selector, self.nodes, self.heard = selectors.DefaultSelector(), [], []
        self.info = ProcessInfo(0, 2, 0, 1, 0, 2, "127.0.0.1", free_port(), "test", "n0", secret="s3")
        self.door = Door(self.info, self, self.selector)  # type: ignore[arg-type]

    def joined(self, node: Any) -> None:
        self.nodes.append(node)

    def gone(self, node: Any, why: str) -> None:
        self.nodes.remove(node)
        self.heard.append(why)

    def on_told(self, *event: Any) -> None:
        self.heard.append(event[1:])

    on_ended = on_stopped = signalled = on_told

    def turn(self, until: Any, seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < end
            for key, _ in self.selector.select(0.01):
                key.data()
            for node in list(self.nodes):
                node.poll()
            self.door.tick()

    def connect(self) -> tuple[socket.socket, str]:
        before = len(self.door._strangers)
        sock = socket.create_connection(("127.0.0.1", self.info.master_port), timeout=10)
        self.turn(lambda: len(self.door._strangers) > before)
        return sock, json.loads(sock.recv(1000))["nonce"]

    def node(self) -> socket.socket:
        sock, nonce = self.connect()
        sock.sendall(json.dumps({**HELLO, "port": 7, "proof": _proof("s3", nonce)}).encode() + b"\n")
        self.turn(lambda: self.nodes)
        return sock

    def close(self) -> None:
        self.door.close(let_go=False, code=0)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Any:
    # The module itself would import torch.
    listen = SimpleNamespace(listen=lambda info: socket.create_server((info.master_addr, info.master_port)))
    monkeypatch.setitem(sys.modules, "megatron_port.run.rendezvous", listen)
    made = Served()
    yield made
    made.close()


HELLO = {"host": "n1", "place": 1, "port": 1, "version": __version__}


@pytest.mark.parametrize("line", [
    b"GET / HTTP/1.1\r\n", b"\xff\xfe\n", b"[" * 100_000 + b"\n", b"{}\n", json.dumps(HELLO).encode() + b"\n",
    json.dumps({**HELLO, "proof": "\u00e9\ud800"}).encode() + b"\n", json.dumps({**HELLO, "proof": 7}).encode() + b"\n",
])
def test_strangers_are_closed_whatever_they_say(served: Served, line: bytes) -> None:
    sock, _ = served.connect()
    sock.sendall(line)
    served.turn(lambda: not served.door._strangers)
    assert sock.recv(10) == b"" and not served.nodes
    served.node().close()


def test_a_proof_is_of_one_connection(served: Served) -> None:
    """Who has listened to another's cannot use it."""
    first, nonce = served.connect()
    other, _ = served.connect()
    other.sendall(json.dumps({**HELLO, "proof": _proof("s3", nonce)}).encode() + b"\n")
    served.turn(lambda: len(served.door._strangers) == 1)
    assert other.recv(10) == b"" and not served.nodes
    first.close()


def test_events_come_whole_and_in_order(served: Served) -> None:
    sock = served.node()
    text = b"".join(json.dumps(event).encode() + b"\n" for event in (
        {"event": "told", "local": 1, "told": {"kind": "x" * 100_000}, "port": 8}, {"beat": True},
        {"event": "ended", "local": 1, "code": -9, "hint": "why", "port": 9}, {"event": "stopped", "local": 0},
        {"event": "signal", "number": 10}))
    thread = threading.Thread(target=sock.sendall, args=(text,))
    thread.start()
    served.turn(lambda: len(served.heard) == 4)
    thread.join()
    assert served.heard == [(1, {"kind": "x" * 100_000}), (1, -9, "why"), (0,), ()] and served.nodes[0].port == 9
    sock.shutdown(socket.SHUT_WR)
    served.turn(lambda: len(served.heard) == 5)
    assert served.heard[-1] == "its connection has ended" and not served.door._nodes
    sock.close()


def test_a_silent_node_is_lost_and_one_that_beats_is_not(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "SILENCE_S", 0.5)
    monkeypatch.setattr(relay, "BEAT_S", 0.05)
    sock = served.node()
    begun = time.monotonic()
    lines = Lines(sock)
    while time.monotonic() < begun + 0.8:
        lines.beat()
        served.turn(lambda: True)
        for key, _ in served.selector.select(0.01):
            key.data()
        served.nodes[0].poll()
    assert not served.heard
    served.turn(lambda: served.heard)
    assert served.heard == ["nothing was heard of it for 0.5 s"]
    assert sum("beat" in told for told in lines.read()) > 3, "it heard the agent too"
    sock.close()


def test_what_a_connection_does_not_take_at_once_is_sent_later() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    mine = socket.create_connection(server.getsockname())
    theirs, _ = server.accept()
    server.close()
    lines, got, text = Lines(mine), bytearray(), "x" * 8_000_000
    lines.send(text=text)
    lines.send(last=1)
    assert lines._unsent
    theirs.settimeout(5)
    while b'{"last": 1}\n' not in got[-100:]:
        lines.beat()
        got += theirs.recv(1 << 20)
    said = [json.loads(line) for line in got.split(b"\n") if line and b"beat" not in line]
    assert said == [{"text": text}, {"last": 1}]
    mine.close()
    theirs.close()


def test_connections_to_lost_nodes_end_and_nothing_is_left_open(tmp_path: Path) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    out = socket.create_connection(server.getsockname())
    into, _ = server.accept()
    other = socket.create_server(("127.0.0.2", 0))
    pair = socket.socketpair()
    elsewhere = socket.create_connection(other.getsockname())
    with open(tmp_path / "file", "w"):
        before = len(os.listdir("/proc/self/fd"))
        assert end_connections(["10.9.9.9"]) == 0
        assert end_connections(["127.0.0.1"]) >= 2
        assert len(os.listdir("/proc/self/fd")) == before
    assert out.recv(1) == b"" and into.recv(1) == b""
    over = other.accept()[0]
    for mine, theirs in (pair, (elsewhere, over)):
        mine.sendall(b"x")
        assert theirs.recv(1) == b"x"
    for sock in (server, other, out, into, elsewhere, over, *pair):
        sock.close()


# The other end.

def test_a_node_that_does_not_hear_the_agent_ends(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """Sooner than the agent gives its place away. Until then it beats, and it passes signals on."""
    monkeypatch.setattr(relay, "FENCE_S", 0.5)
    monkeypatch.setattr(relay, "BEAT_S", 0.1)
    server = socket.create_server(("127.0.0.1", 0))
    info = ProcessInfo(1, 2, 0, 1, 1, 2, "127.0.0.1", server.getsockname()[1], "test", "n1", secret="s3")
    let_go: list[int] = []
    kept = Kept(Meeting(0, "", 0, ("", ""), 2), lambda info, kept: 0, lambda: let_go.append(1))
    node = relay.Relay(info, kept, 5.0)
    agent, _ = server.accept()
    server.close()
    agent.sendall(b'{"nonce": "7"}\n')
    node._signals.append(10)
    cut, begun = threading.Timer(5.0, agent.shutdown, [socket.SHUT_RDWR]), time.monotonic()
    cut.start()
    assert node.run() == 3 and time.monotonic() - begun >= 0.5 and not let_go
    cut.cancel()
    assert "nothing was heard of it for 0.5 s" in capfd.readouterr().err
    node._lines.sock.close()
    told = [json.loads(line) for line in agent.makefile("rb")]
    assert {k: told[0][k] for k in ("host", "place", "proof")} == {
        "host": socket.gethostname(), "place": 1, "proof": _proof("s3", "7")} or told[0].get("beat")
    assert {"event": "signal", "number": 10} in told and sum("beat" in line for line in told) >= 2
    agent.close()


# A node's ranks.

class Listener:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def on_told(self, node: Any, local: int, told: dict[str, Any]) -> None:
        self.heard.append((local, told["kind"]))

    def on_ended(self, node: Any, local: int, code: int, hint: str = "") -> None:
        self.heard.append((local, f"{code} {hint}" if hint else code))

    def on_stopped(self, node: Any, local: int) -> None:
        self.heard.append((local, "stopped"))


def test_a_kill_by_the_kernel_for_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    kills = iter((3, 3, 4, 4))
    monkeypatch.setattr(node_ranks, "out_of_memory_kills", lambda: next(kills))
    node = NodeRanks(selectors.DefaultSelector(), lambda info, kept: 0, Listener(), lambda: None)
    told = [node._hint() for _ in range(3)]
    assert told == ["", f"the kernel of {node.hostname} has killed a process for lack of memory meanwhile", ""]


def test_the_hosts_of_many_nodes_reach_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a socket's buffer holds."""
    for name in ("RANK", LOCAL_RANK_VARIABLE, AGENT_VARIABLE):  # what process_info sets is of this test alone
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(local_ranks, "name_rank", lambda rank: None)
    mine, theirs = socket.socketpair()
    node = NodeRanks(selectors.DefaultSelector(), lambda info, kept: 0, Listener(), lambda: None)
    from megatron_port.run.node_ranks import SENT_S, _Child

    mine.settimeout(SENT_S)
    node._children[1] = _Child(0, 1, mine)
    hosts = [f"frontier{i:05d}.frontier.olcf.ornl.gov" for i in range(9408)]
    link = AgentLink(theirs)
    meeting = Meeting(1, "h", 1, tuple(hosts), 8, 5).body()
    recovery = vars(Restart(1, "", 0.0, 1, 1))
    threading.Timer(0.1, lambda: node.tell(0, "start", meeting=meeting, recovery=recovery)).start()
    found = link.lost("x", victim=True, step=1)
    assert found is not None and found[0].hosts == tuple(hosts)
    info = process_info(found[0], 3)
    assert (info.rank, info.local_rank, info.num_nodes) == (43, 3, 9408) and os.environ["RANK"] == "43"
    node.tell(0, END)
    assert link.lost("x", victim=True, step=1) is None and not link.replaced
    mine.close()
