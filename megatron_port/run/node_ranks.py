"""The ranks of one node: forked here, reaped here, and the messages between them and the agent of the run.

What is decided about them is decided by the agent (``run.agent``): in this process on its own node, over a connection
(``run.relay``) on the others. Ranks have numbers within the node here, from 0.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from megatron_port.core.dist.rank import ProcessInfo
from megatron_port.run.agent_link import LEAVE, LOST, START, AgentLink, KeptRank, Restart
from megatron_port.run.local_ranks import Meeting, fork_child, free_port, process_info
from megatron_port.run.processes import out_of_memory_kills, stopped

STOPPED_S = 0.5
"""During a recovery, a process that a signal has stopped is reported after this time."""

SENT_S = 1.0
"""A rank reads a message within this time, however long: the hosts of thousands of nodes exceed what a socket holds."""

RankMain = Callable[[ProcessInfo, KeptRank], int]


class NodeListener(Protocol):
    """Whoever hears of a node's ranks."""

    def on_told(self, node: Any, local: int, told: dict[str, Any]) -> None:
        """A rank has sent a message."""

    def on_ended(self, node: Any, local: int, code: int, hint: str = "") -> None:
        """A rank's process has ended; ``code``: as ``os.waitstatus_to_exitcode`` has it; ``hint``: why, perhaps."""

    def on_stopped(self, node: Any, local: int) -> None:
        """A rank that should leave its step is stopped by a signal."""


@contextlib.contextmanager
def noted_signals(
    note: Callable[[int, FrameType | None], None], interrupted: Callable[[int, FrameType | None], None]
) -> Iterator[Callable[[], None]]:
    """Take a scheduler's signals over; yield what gives them back, for a rank's process.

    A terminal's Ctrl-C reaches the ranks by itself; the agent only learns that the run is to end (``interrupted``).
    """
    before = {n: signal.signal(n, note) for n in (signal.SIGTERM, signal.SIGUSR1)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupted if sys.stdin.isatty() else note)

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    try:
        yield restore
    finally:
        restore()


@dataclass(eq=False)
class _Child:
    local: int
    pid: int
    sock: socket.socket
    asked_at: float = 0.0
    """When it was asked to leave its step; 0: it was not, or has."""
    unread: bytes = b""


class NodeRanks:
    """The ranks of this node.

    Args:
        selector: of the caller's loop; the ranks' sockets are registered with a callable to read them.
        restore: gives a rank's process the signal handlers that it had.
        address: of this node, as ranks of other nodes reach it.
    """

    def __init__(
        self, selector: selectors.BaseSelector, main: RankMain, listener: NodeListener, restore: Callable[[], None], *,
        address: str = "127.0.0.1",
    ) -> None:
        self._selector, self._main, self._listener, self._restore = selector, main, listener, restore
        self._children: dict[int, _Child] = {}
        """By process id: those that live."""
        self.hostname, self.address = socket.gethostname(), address
        self._memory_kills = out_of_memory_kills()

    @property
    def quiet_s(self) -> float:
        """Zero: it is this node."""
        return 0.0

    @property
    def port(self) -> int:
        """A port of this node's address that nobody listens on now."""
        return free_port(self.address)

    def start(self, new: Sequence[int], kept: Sequence[int], meeting: Meeting, recovery: Restart | None) -> int | None:
        """Fork the ranks that are ``new``, and tell those that are ``kept`` where to meet them.

        In a rank's process return its exit code, in the caller's None.
        """
        # Until it trains, and can save, a rank defers a scheduler's signals.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1))
        for local in new:
            mine, theirs = socket.socketpair()
            pid = fork_child()
            if pid == 0:
                self._restore()
                self._close_all()
                mine.close()
                return self._main(process_info(meeting, local), KeptRank(AgentLink(theirs), recovery))
            theirs.close()
            mine.settimeout(SENT_S)
            child = self._children[pid] = _Child(local, pid, mine)
            self._selector.register(mine, selectors.EVENT_READ, lambda child=child: self._read(child))
        gc.enable()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for local in kept:
            self.tell(local, START, meeting=meeting.body(), recovery=recovery and vars(recovery))
        return None

    def _close_all(self) -> None:
        """Close what the caller's loop reads: none of it is a rank's."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()

    def tell(self, local: int, kind: str, **values: Any) -> None:
        """Send a message to a rank."""
        for child in self._children.values():
            if child.local == local:
                child.asked_at = time.monotonic() if kind == LEAVE else 0.0
                with contextlib.suppress(OSError):  # it died just now
                    child.sock.sendall(json.dumps({"kind": kind, **values}).encode() + b"\n")

    def send_signal(self, number: int, locals_: Sequence[int] | None = None) -> None:
        """Send a signal to some ranks; None: to all."""
        for child in self._children.values():
            if locals_ is None or child.local in locals_:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, number)

    def poll(self) -> None:
        """Report ranks that have ended, and those that are stopped and should leave their step."""
        self._reap()
        now = time.monotonic()
        for child in list(self._children.values()):
            if child.asked_at and now - child.asked_at > STOPPED_S:
                child.asked_at = now
                if stopped(child.pid):
                    self._listener.on_stopped(self, child.local)

    def end(self) -> None:
        """Kill what lives, and wait for it."""
        self.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 5.0
        while self._children and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.01)

    def _read(self, child: _Child) -> None:
        try:
            data = child.sock.recv(1 << 16)
        except TimeoutError:
            return
        except OSError:
            data = b""
        if not data:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(child.sock)
            return
        child.unread += data
        while b"\n" in child.unread:
            line, _, child.unread = child.unread.partition(b"\n")
            told = json.loads(line)
            if told["kind"] == LOST:
                child.asked_at = 0.0
            self._listener.on_told(self, child.local, told)

    def _reap(self) -> None:
        while self._children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self._children.pop(pid, None)
            if child is None:
                continue
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(child.sock)
            child.sock.close()
            code = os.waitstatus_to_exitcode(status)
            self._listener.on_ended(self, child.local, code, self._hint() if code == -signal.SIGKILL else "")

    def _hint(self) -> str:
        """Return a reason for a rank's death by SIGKILL; empty: none is known."""
        before, self._memory_kills = self._memory_kills, out_of_memory_kills()
        if self._memory_kills <= before:
            return ""
        return f"the kernel of {self.hostname} has killed a process for lack of memory meanwhile"
