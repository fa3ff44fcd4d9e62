"""The agent of a node: it starts the node's ranks, and when one is lost starts that one again beside those that live.

A rank that is killed leaves the others with errors of the communication library. Each of them leaves its step, tells
the agent, and waits (``run.recovery``). Once all that live have told, the agent forks the lost ones and tells everyone
where to meet. A rank that has not told in time is stuck, and is replaced as well: the state is in the node's memory,
not in the process.

The agent imports what ranks need and runs nothing of torch, so that what it forks starts clean
(``run.local_ranks``).
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from megatron_port.core.dist.rank import ProcessInfo
from megatron_port.core.errors import EXIT_ENVIRONMENT, EXIT_HANG, EnvironmentFault
from megatron_port.run.agent_link import END, LEAVE, LOST, REPLACED, RUNNING, START, AgentLink, KeptRank, Restart
from megatron_port.run.local_ranks import GRACE_S, LocalStart, fork_child, import_for_all
from megatron_port.run.processes import stopped

TELL_S = 10.0
"""Ranks that live have so long to leave their step. Then they are stuck, and are replaced."""
STOPPED_S = 0.5
"""During a recovery, a process that a signal has stopped is replaced after this time."""
CAUSE_S = 1.5
"""The cause of what a rank reports, another's death, is seen within this time."""
MOST_AT_ONE_STEP = 3
"""Losses in training from the same step on. A fault that comes back is not the machine's."""
MOST_IN_A_ROW = 30
"""Starts in a row of which none came to train."""
TICK_S = 0.02

RankMain = Callable[[ProcessInfo, KeptRank], int]


@dataclass
class _Child:
    rank: int
    pid: int
    sock: socket.socket
    running: bool = False
    """It trains: it has its state."""
    told: dict[str, Any] | None = None
    """Its report of a lost peer; it waits for an answer."""
    told_at: float = 0.0
    replaced: bool = False
    """The agent ends it, to start it again; whatever its exit code."""
    unread: bytes = b""


class Agent:
    """Agent of one node.

    Args:
        first: how its ranks are started.
        rank_main: called in each rank's process.
        let_go: called once the run has ended well, or by an error of all ranks: nothing will be recovered.
    """

    def __init__(self, first: LocalStart, rank_main: RankMain, let_go: Callable[[], None]) -> None:
        self._start, self._main, self._let_go = first, rank_main, let_go
        self._children: dict[int, _Child] = {}
        """By process id: those that live."""
        self._selector = selectors.DefaultSelector()
        self._number = 0
        self._lost: list[str] = []
        """Losses since the ranks last trained together."""
        self._lost_at = 0.0
        self._since = 0.0
        """When this recovery began; 0: none is under way."""
        self._asked = False
        """Ranks were asked to leave their step, as one has reported."""
        self._step = 0
        """The last that any rank told of."""
        self._at, self._times = -1, 0
        """Step of the last losses in training, and how many of them there were."""
        self._in_a_row = 0
        self._trained = False
        """This recovery follows a loss in training, not one on the way there."""
        self._first_epoch = 0
        """Epoch of the first start that came to train; 0: none has."""
        self._signals: list[int] = []
        """Signals that came, and are not passed on yet."""
        self._away = False
        """From a loss until the ranks train together again."""
        self._stopping = self._agreed = False
        """A signal was passed on, or a rank failed for good: nothing is started any more. All ranks failed alike."""
        self._code, self._deadline = 0, float("inf")

    def run(self) -> int:
        """Start the ranks and keep them; return the exit code of the run.

        In a rank's process this returns what ``rank_main`` returns.
        """
        forward = {n: signal.signal(n, self._note) for n in (signal.SIGTERM, signal.SIGUSR1)}
        # A terminal's Ctrl-C reaches the ranks by itself; the agent only learns that the run is to end.
        interactive = signal.signal(signal.SIGINT, self._interrupted if sys.stdin.isatty() else self._note)

        def restore() -> None:
            signal.signal(signal.SIGINT, interactive)
            for number, handler in forward.items():
                signal.signal(number, handler)

        try:
            while True:
                own = self._fork_missing(restore)
                if own is not None:
                    return own
                if self._serve():
                    if self._first_epoch and (self._agreed or not self._code):
                        self._let_go()
                    return self._code
        finally:
            restore()

    # Starting.

    def _fork_missing(self, restore: Callable[[], None]) -> int | None:
        """Start the ranks that do not live. In a rank's process return its exit code, in the agent None."""
        here = {child.rank for child in self._children.values()}
        # Until it trains, and can save, a rank defers a scheduler's signals.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1))
        recovery = Restart(
            self._number, self._why(), self._lost_at, self._step, self._first_epoch) if self._number else None
        for rank in sorted(set(range(self._start.nproc)) - here):
            mine, theirs = socket.socketpair()
            pid = fork_child()
            if pid == 0:
                restore()
                self._selector.close()
                mine.close()
                for child in self._children.values():
                    child.sock.close()
                info = self._start.info(rank, attempt=str(self._number))
                return self._main(info, KeptRank(AgentLink(theirs), recovery))
            theirs.close()
            mine.setblocking(False)
            child = _Child(rank, pid, mine)
            self._children[pid] = child
            self._selector.register(mine, selectors.EVENT_READ, child)
        gc.enable()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for child in self._children.values():
            if child.told is not None and recovery is not None:
                child.told = None
                self._answer(child, START, port=self._start.port, **vars(recovery))
        self._since, self._asked = 0.0, False
        return None

    def _answer(self, child: _Child, kind: str, **values: Any) -> None:
        with contextlib.suppress(OSError):  # it died just now
            child.sock.sendall(json.dumps({"kind": kind, **values}).encode() + b"\n")

    # Serving.

    def _serve(self) -> bool:
        """Serve until ranks are to be started again (False), or the run has ended (True)."""
        while self._children or self._since:
            for key, _ in self._selector.select(TICK_S):
                self._read(key.data)
            self._reap()
            now = time.monotonic()
            if self._signals:
                self._pass_on()
            if now > self._deadline:
                self._replace(list(self._children.values()))
                self._deadline = float("inf")
            if self._since and self._gathered(now) and not self._too_often():
                return False
            self._judge(now)
        return True

    def _read(self, child: _Child) -> None:
        try:
            data = child.sock.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            with contextlib.suppress(KeyError):
                self._selector.unregister(child.sock)
            return
        child.unread += data
        while b"\n" in child.unread:
            line, _, child.unread = child.unread.partition(b"\n")
            self._take(child, json.loads(line))

    def _take(self, child: _Child, told: dict[str, Any]) -> None:
        if told["kind"] == RUNNING:
            child.running, self._step = True, int(told["step"])
            self._first_epoch = self._first_epoch or int(told["epoch"])
            if not self._since and self._all_train():
                self._lost.clear()
                self._in_a_row, self._away = 0, False
        elif told["kind"] == LOST:
            self._step = max(self._step, int(told["step"]))
            child.told, child.told_at, child.running = told, time.monotonic(), False
            if self._stopping:
                self._answer(child, END)

    def _reap(self) -> None:
        while True:
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
            self._ended(child, os.waitstatus_to_exitcode(status))

    def _ended(self, child: _Child, code: int) -> None:
        """Take note of a rank's end: done, lost, or a fault that would come again."""
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if self._stopping or code == -signal.SIGINT:
            self._give_up(128 - code if code < 0 else code, f"rank {child.rank} {how}" if code < 0 else "")
        elif code < 0 or code in (1, EXIT_HANG) or child.replaced:
            self._lose("" if child.replaced else f"rank {child.rank} {how}", trained=child.running)
        elif code:
            self._give_up(code)

    def _lose(self, what: str, *, trained: bool = False) -> None:
        """Begin a recovery, or add to the one under way. ``trained``: the rank that was lost had its state."""
        if what:
            self._lost.append(what)
        if not self._since:
            self._since, self._lost_at, self._away = time.monotonic(), time.time(), True
            self._trained = trained or any(c.running or c.told is not None for c in self._children.values())
            self._ask_to_leave()
        # Ranks on their way to a meeting that cannot be held have nothing to lose, and would wait for long.
        self._replace([c for c in self._children.values() if not c.running and c.told is None and not c.replaced])

    def _ask_to_leave(self) -> None:
        for child in self._children.values():
            if child.running:
                self._answer(child, LEAVE)

    def _all_train(self) -> bool:
        return len(self._children) == self._start.nproc and all(c.running for c in self._children.values())

    def _replace(self, children: Sequence[_Child]) -> None:
        for child in children:
            child.replaced = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)

    def _gathered(self, now: float) -> bool:
        """Whether every rank that lives has left its step; those that are stuck are replaced."""
        busy = [c for c in self._children.values() if c.told is None]
        still = [c for c in busy if not c.replaced and stopped(c.pid)]
        if still and now - self._since > STOPPED_S:  # it cannot leave, and keeps those waiting that wait for it
            self._lost += [f"rank {c.rank} is stopped" for c in still]
            self._replace(still)
        if busy and now - self._since > TELL_S:
            self._lost += [f"rank {c.rank} did not leave its step within {TELL_S:g} s" for c in busy if not c.replaced]
            self._replace(busy)
        return not busy

    def _too_often(self) -> bool:
        """Count this recovery; give up where the step is the same again and again."""
        if self._trained:
            self._times = self._times + 1 if self._step == self._at else 1
            self._at = self._step
        self._in_a_row += 1
        often = self._times > MOST_AT_ONE_STEP
        if often or self._in_a_row > MOST_IN_A_ROW:
            count = (f"the {self._times}th loss since a copy or checkpoint of step {self._at} was the newest" if often
                     else f"none of the last {MOST_IN_A_ROW} starts came to train")
            self._give_up(self._code or EXIT_ENVIRONMENT,
                          f"{self._why()}: {count}, so it is not one rank that happened to die; the run ends")
            return True
        self._number += 1
        self._start.port = LocalStart.free_port()
        kept = len(self._children)
        self._say(f"recovery {self._number}: {self._why()}; ranks that keep their processes: {kept}, that are started "
                  f"again: {self._start.nproc - kept}")
        return False

    def _why(self) -> str:
        shown = "; ".join(self._lost[:4])
        return shown + (f"; and {len(self._lost) - 4} more" if len(self._lost) > 4 else "")

    def _judge(self, now: float) -> None:
        """Decide about reports without a death: an error of all ranks, of one alone, or a link that was cut."""
        waiting = [c for c in self._children.values() if c.told is not None]
        waited = now - min((c.told_at for c in waiting), default=now)
        if self._since or self._stopping or waited < CAUSE_S:
            return
        if len(waiting) < len(self._children) and waited < TELL_S:
            if not self._asked:
                self._asked = True
                self._ask_to_leave()  # the others may compute for a while, or wait inside of NCCL
            return
        own = [c for c in waiting if c.told is not None and not c.told["victim"]]
        if len(own) == len(self._children):
            self._agreed = True
            self._give_up(0)  # each raises it
            self._deadline = min(self._deadline, now + GRACE_S)
        elif own:
            for child in own:
                why = str(child.told["why"]).partition("\n")[0] if child.told is not None else ""
                self._lost.append(f"rank {child.rank} failed alone: {why[:300]}")
                child.told, child.replaced = None, True
                self._answer(child, REPLACED)
            self._lose("", trained=True)
        else:
            why = str(waiting[0].told["why"]) if waiting[0].told is not None else ""
            self._lose(f"rank {waiting[0].rank} lost a peer although all processes live ({why[:300]})")

    def _give_up(self, code: int, line: str = "") -> None:
        """Start nothing any more; the ranks that wait raise what they met."""
        if code and not self._code:
            self._code = code
            if line:
                self._say(f"error: {line}")
        self._stopping, self._since = True, 0.0
        if code:
            self._deadline = min(self._deadline, time.monotonic() + GRACE_S)
        for child in self._children.values():
            if child.told is not None:
                child.told = None
                self._answer(child, END)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _pass_on(self) -> None:
        """Pass signals on; during a recovery once the ranks train again, when they can save. A second one at once."""
        waiting = [c for c in self._children.values() if c.told is not None]
        if (self._away or waiting) and len(self._signals) < 2 and not self._stopping:
            return
        self._stopping, self._since = True, 0.0
        for child in self._children.values():
            for number in self._signals:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, number)
            if child.told is not None:
                child.told = None
                self._answer(child, END)
        self._signals.clear()

    @staticmethod
    def _say(line: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(line + "\n")
            sys.stderr.flush()


def run_kept(
    nproc: int, rank_main: RankMain, let_go: Callable[[], None], *, preload: Sequence[str] = (), port: int | None = None
) -> int:
    """Fork ``nproc`` ranks, keep them, and return the exit code of the run; in a rank, what ``rank_main`` returns.

    Raises:
        ConfigError, EnvironmentFault: as ``run.local_ranks.run_local``.
    """
    start = LocalStart.of(nproc, port)
    if not hasattr(os, "fork"):
        raise EnvironmentFault('launch.when_lost "replace" needs a system that can fork processes')
    import_for_all(preload)
    return Agent(start, rank_main, let_go).run()
