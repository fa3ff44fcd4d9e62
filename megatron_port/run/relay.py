"""A run of several nodes: a process on each node forks its ranks, and relays between them and the run's agent.

A launcher starts one process a node (``srun --ntasks-per-node=1 megatron-port train RUN --nproc 8``). The first is the
agent (``run.agent``); the others connect to it, and so does every spare node. Both ends say that they live once a
second. A node that is silent or whose connection has ended is lost, with its ranks; a node that does not hear the agent
ends its ranks before the agent gives their places away.

Messages are one JSON text a line. Where the job scripts have set MEGATRON_PORT_SECRET, a process that does not know it
is not listened to; without it the network is trusted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from megatron_port import __version__
from megatron_port.core.dist.rank import ProcessInfo
from megatron_port.core.errors import EXIT_ENVIRONMENT, EnvironmentFault
from megatron_port.run.agent import TICK_S, Agent, Kept, refuse_without_fork
from megatron_port.run.agent_link import Restart
from megatron_port.run.local_ranks import Meeting, import_for_all
from megatron_port.run.node_ranks import NodeRanks, noted_signals
from megatron_port.run.watch.hub_process import hub_address

BEAT_S = 1.0
SILENCE_S = 8.0
"""The agent takes a node for lost that it has not heard for so long."""
FENCE_S = 5.0
"""A node that has not heard the agent for so long ends its ranks: sooner, so that they are not there twice."""
STRANGER_S = 30.0
"""A connection that has not shown by then that it is of this run is closed."""
LEFT_S, LOOK_S = 600.0, 2.0
"""A node without an agent looks for so long, and so often, whether the run has continued without it."""
SPARES_S = 10.0
"""Nodes beyond those that the run needs are waited for so long at the start; one that comes later is a spare too."""
_LONGEST_LINE = 1 << 24


def _proof(secret: str, nonce: str) -> str:
    return hmac.new(secret.encode(), f"relay {nonce}".encode(), hashlib.sha256).hexdigest()


class Lines:
    """A connection of lines of JSON, that is read without waiting.

    Attributes:
        heard: when something last came (``time.monotonic``).
        peer: address of the other end.
        ended: why there is no connection any more; empty: there is.

    Raises:
        OSError: the other end has gone.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        self.sock, self.heard, self.ended = sock, time.monotonic(), ""
        self.peer = str(sock.getpeername()[0])
        self._unread, self._unsent, self._beat = b"", b"", 0.0

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield what has come."""
        try:
            data = self.sock.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError as error:
            self.ended = error.strerror or str(error)
            return
        if not data:
            self.ended = "its connection has ended"
            return
        self.heard, self._unread = time.monotonic(), self._unread + data
        while b"\n" in self._unread:
            line, _, self._unread = self._unread.partition(b"\n")
            try:
                told = json.loads(line)
            except (ValueError, RecursionError):  # a port scanner, say
                self.ended = "it does not speak this protocol"
                return
            if isinstance(told, dict):
                yield told
        if len(self._unread) > _LONGEST_LINE:
            self.ended = f"it sent more than {_LONGEST_LINE} bytes without an end of line"

    def send(self, **told: Any) -> None:
        """Send a message, as far as the connection takes it now; the rest with the next."""
        self._unsent += json.dumps(told).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what is left."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self.sock.send(self._unsent):]
        except BlockingIOError:
            return
        except OSError as error:
            self.ended = self.ended or error.strerror or str(error)

    def beat(self) -> None:
        """Say once a second that this end lives."""
        now = time.monotonic()
        if now - self._beat >= BEAT_S:
            self._beat = now
            self.send(beat=True)
        elif self._unsent:
            self.flush()

    def silent(self, seconds: float) -> str:
        """Return why the other end is taken for lost; empty: it is not."""
        if not self.ended and time.monotonic() - self.heard > seconds:
            return f"nothing was heard of it for {seconds:g} s"
        return self.ended


class RemoteNode:
    """A node at the other end of a connection, as the agent sees it."""

    def __init__(self, lines: Lines, agent: Agent, hello: dict[str, Any]) -> None:
        self._lines, self._agent = lines, agent
        self.hostname, self.address = str(hello["host"]), lines.peer
        self.place = int(hello["place"])
        """Number that the launcher gave to the node."""
        self._port = int(hello["port"])

    @property
    def quiet_s(self) -> float:
        """Seconds for which nothing was heard of it."""
        return time.monotonic() - self._lines.heard

    @property
    def port(self) -> int:
        """A port that was free when the node came, or when one of its ranks last told something or ended."""
        return self._port

    def start(self, new: Sequence[int], kept: Sequence[int], meeting: Meeting, recovery: Restart | None) -> int | None:
        """Have the node's process do it."""
        self._lines.send(do="start", new=list(new), kept=list(kept), meeting=meeting.body(),
                         recovery=recovery and vars(recovery))
        return None

    def tell(self, local: int, kind: str, **values: Any) -> None:
        """Have a message passed on to a rank."""
        self._lines.send(do="tell", local=local, kind=kind, values=values)

    def send_signal(self, number: int, locals_: Sequence[int] | None = None) -> None:
        """Have a signal sent to some ranks; None: to all."""
        self._lines.send(do="signal", number=number, ranks=None if locals_ is None else list(locals_))

    def end(self, *, let_go: bool, code: int) -> None:
        """Tell the node that the run has ended."""
        self._lines.send(do="end", let_go=let_go, code=code)

    def read(self) -> None:
        """Take what the node tells."""
        for told in self._lines.read():
            self._port = int(told.get("port", self._port))
            if told.get("event") == "told":
                self._agent.on_told(self, told["local"], told["told"])
            elif told.get("event") == "ended":
                self._agent.on_ended(self, told["local"], told["code"], told["hint"])
            elif told.get("event") == "stopped":
                self._agent.on_stopped(self, told["local"])
            elif told.get("event") == "signal":
                self._agent.signalled(told["number"])

    def poll(self) -> None:
        """Beat, and report the node's loss."""
        self._lines.beat()
        why = self._lines.silent(SILENCE_S)
        if why:
            self._agent.gone(self, why)


class Door:
    """Where the other nodes connect to the agent."""

    def __init__(self, info: ProcessInfo, agent: Agent, selector: selectors.BaseSelector) -> None:
        from megatron_port.run.rendezvous import listen

        self._agent, self._selector, self._secret = agent, selector, info.secret
        self._listener = listen(info)
        self._listener.setblocking(False)
        self._strangers: list[tuple[Lines, str]] = []
        self._nodes: list[tuple[RemoteNode, Lines]] = []
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        with suppress(OSError):
            sock, _ = self._listener.accept()
            lines, nonce = Lines(sock), secrets.token_hex(16)
            lines.send(nonce=nonce)
            self._strangers.append((lines, nonce))
            self._selector.register(sock, selectors.EVENT_READ, lambda: self._greet(lines, nonce))

    def _greet(self, lines: Lines, nonce: str) -> None:
        """Take the first message of a connection; a stranger's is closed."""
        for hello in lines.read():
            if "beat" in hello:
                continue
            right = hmac.compare_digest(str(hello.get("proof", "")).encode(errors="replace"),
                                        _proof(self._secret, nonce).encode())
            if not right or not {"host", "place", "port"} <= hello.keys():
                lines.ended = "it does not know the run's secret"
                break
            if hello.get("version") != __version__:
                lines.send(do="refuse", why=f"{hello['host']} has megatron_port {hello.get('version')}, and the run's "
                           f"agent {__version__}; give all nodes the same environment")
                lines.ended = "it has another version"
                break
            try:
                node = RemoteNode(lines, self._agent, hello)
            except (TypeError, ValueError, OSError):
                lines.ended = "it says nothing that a node says"
                break
            self._strangers.remove((lines, nonce))
            self._nodes.append((node, lines))
            self._selector.modify(lines.sock, selectors.EVENT_READ, node.read)
            self._agent.joined(node)
            return
        if lines.ended:
            self._strangers.remove((lines, nonce))
            self._forget(lines)

    def _forget(self, lines: Lines) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(lines.sock)
        lines.sock.close()

    def tick(self) -> None:
        """Close the connections of nodes that are lost, and of those that have said nothing."""
        for lines, nonce in list(self._strangers):
            if lines.silent(STRANGER_S):
                self._strangers.remove((lines, nonce))
                self._forget(lines)
        for node, lines in list(self._nodes):
            if node not in self._agent.nodes:
                self._nodes.remove((node, lines))
                self._forget(lines)

    def close(self, *, let_go: bool, code: int) -> None:
        """Tell every node that the run has ended, and wait a little until they have closed."""
        for node, _ in self._nodes:
            node.end(let_go=let_go, code=code)
        until = time.monotonic() + 5.0
        for _, lines in self._nodes:
            with suppress(OSError):
                lines.flush()
                lines.sock.settimeout(max(0.01, until - time.monotonic()))
                while lines.sock.recv(1 << 16):
                    pass
            lines.sock.close()
        self._listener.close()


def keep_nodes(info: ProcessInfo, kept: Kept, *, preload: Sequence[str] = (), timeout_s: float) -> int:
    """Keep the ranks of a run of several nodes, on one of the processes that a launcher started, one a node.

    In a rank's process this returns what its main function returns, in the node's process the run's exit code.

    Args:
        info: of the node's process: its rank is the node's, and the first node's is the agent.
        preload: modules that the ranks need.
        timeout_s: for the nodes to come, and for a node to reach the agent.

    Raises:
        EnvironmentFault: nodes did not come, or the agent cannot be reached.
    """
    refuse_without_fork()
    import_for_all(preload)
    if info.rank:
        return Relay(info, kept, timeout_s).run()
    selector = selectors.DefaultSelector()
    agent = Agent(kept, selector)
    with noted_signals(agent.note_signal, agent.interrupted) as restore:
        door = Door(info, agent, selector)
        agent.tick = door.tick
        agent.joined(NodeRanks(selector, kept.main, agent, restore, address=hub_address(info)))
        try:
            _await_nodes(info, agent, timeout_s)
        except EnvironmentFault:
            door.close(let_go=False, code=EXIT_ENVIRONMENT)
            raise
        code = agent.run()
        if agent.in_rank:
            return code
        door.close(let_go=agent.lets_go, code=code)
        if agent.lets_go:
            kept.let_go()
        return code


def _await_nodes(info: ProcessInfo, agent: Agent, timeout_s: float) -> None:
    begun = time.monotonic()
    while len(agent.nodes) < info.world_size:
        waited = time.monotonic() - begun
        if agent.has_places_filled and waited > SPARES_S:
            break
        if waited > timeout_s:
            came = ", ".join(node.hostname for node in agent.nodes)
            raise EnvironmentFault(
                f"{len(agent.nodes)} of {info.world_size} nodes came to {info.master_addr}:{info.master_port} within "
                f"{timeout_s:g} s ({came}); look at the others and their logs; if they start slowly, raise "
                "launch.rendezvous_timeout"
            )
        agent.turn()
        if agent.is_told_to_end:
            raise EnvironmentFault("a signal to end came before the run's nodes had")
    names = [node.hostname for node in agent.nodes]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise EnvironmentFault(f"{', '.join(sorted(twice))}: two processes were started there, and each would fork "
                               "--nproc ranks: start one a node")
    # The order of the launcher is that of the network: ranks that are neighbours stay neighbours.
    agent.nodes.sort(key=lambda node: getattr(node, "place", 0))


class Relay:
    """The process of a node that is not the agent's.

    Args:
        info: of this process, one of the launcher's.
        kept: the run, as the agent knows it.
        timeout_s: for which the agent is looked for.
    """

    def __init__(self, info: ProcessInfo, kept: Kept, timeout_s: float) -> None:
        self._info, self._kept = info, kept
        self._lines = Lines(_connected(info, timeout_s))
        self._selector = selectors.DefaultSelector()
        self._address = str(self._lines.sock.getsockname()[0])
        self._in_rank: int | None = None
        self._over: int | None = None
        self._ranks: NodeRanks | None = None
        self._signals: list[int] = []

    def run(self) -> int:
        """Serve until the run has ended or the agent is lost; in a rank's process return its exit code."""
        with noted_signals(self._note, self._note) as restore:
            ranks = self._ranks = NodeRanks(self._selector, self._kept.main, self, restore, address=self._address)
            self._selector.register(self._lines.sock, selectors.EVENT_READ, self._read)
            while self._over is None:
                for key, _ in self._selector.select(TICK_S):
                    key.data()
                    if self._in_rank is not None:
                        return self._in_rank
                ranks.poll()
                while self._signals:
                    self._lines.send(event="signal", number=self._signals.pop(0))
                self._lines.beat()
                why = self._lines.silent(FENCE_S)
                if why and self._over is None:
                    print(f"error: {ranks.hostname}: the run's agent on {self._info.master_addr} is lost ({why}); the "
                          "ranks of this node end", file=sys.stderr, flush=True)
                    self._over = EXIT_ENVIRONMENT
                    ranks.end()
                    self._await_successor(ranks.hostname)
            ranks.end()
        return self._over

    def _await_successor(self, hostname: str) -> None:
        """Free the memory of this node's copies once the run has continued without them.

        They stay where the agent is gone, as the next start of the job resumes from them, and while it lives but has
        not recovered: they may be the only ones. ``Kept.left`` tells the two from a run that needs them no more.
        """
        self._lines.sock.close()
        until, alive = time.monotonic() + LEFT_S, True
        while alive:
            alive = self._may_live() and time.monotonic() < until and not self._signals  # first: it may commit and end
            if self._kept.left():
                return
            if alive:
                time.sleep(LOOK_S)
        print(f"{hostname}: the copies of the state stay in this node's memory, for the next start",
              file=sys.stderr, flush=True)

    def _may_live(self) -> bool:
        """Return whether the agent's process may live; False: its host says that it does not."""
        try:
            socket.create_connection((self._info.master_addr, self._info.master_port), timeout=5.0).close()
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
        return True

    def _read(self) -> None:
        assert self._ranks is not None
        for told in self._lines.read():
            if "nonce" in told:
                self._lines.send(host=self._ranks.hostname, place=self._info.rank, port=self._ranks.port,
                                 version=__version__, proof=_proof(self._info.secret, told["nonce"]))
            elif told.get("do") == "start":
                recovery = told["recovery"] and Restart(**told["recovery"])
                self._in_rank = self._ranks.start(told["new"], told["kept"], Meeting.of(told["meeting"]), recovery)
                if self._in_rank is not None:
                    return
            elif told.get("do") == "tell":
                self._ranks.tell(told["local"], told["kind"], **told["values"])
            elif told.get("do") == "signal":
                self._ranks.send_signal(told["number"], told["ranks"])
            elif told.get("do") == "refuse":
                print(f"error: {told['why']}", file=sys.stderr, flush=True)
                self._over = EXIT_ENVIRONMENT
            elif told.get("do") == "end":
                self._over = int(told["code"])
                if told["let_go"]:
                    self._kept.let_go()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    # What this node's ranks do, passed on.

    def on_told(self, node: Any, local: int, told: dict[str, Any]) -> None:
        """Pass it on."""
        self._lines.send(event="told", local=local, told=told, port=node.port)

    def on_ended(self, node: Any, local: int, code: int, hint: str = "") -> None:
        """Pass it on."""
        self._lines.send(event="ended", local=local, code=code, hint=hint, port=node.port)

    def on_stopped(self, node: Any, local: int) -> None:
        """Pass it on."""
        self._lines.send(event="stopped", local=local)


def _connected(info: ProcessInfo, timeout_s: float) -> socket.socket:
    """Return a connection to the agent. Raises EnvironmentFault."""
    deadline, pause = time.monotonic() + timeout_s, 0.05
    while True:
        try:
            return socket.create_connection((info.master_addr, info.master_port), timeout=5.0)
        except OSError as error:
            if time.monotonic() > deadline:
                raise EnvironmentFault(
                    f"node {info.rank} ({info.hostname}) could not reach the run's agent at {info.master_addr}:"
                    f"{info.master_port} within {timeout_s:g} s: {error}; look at the first node's log"
                ) from None
        time.sleep(pause)
        pause = min(2 * pause, 1.0)
