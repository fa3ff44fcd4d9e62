"""Messages between a rank and the run's agent. Torch is not imported: the agent sets threads before that."""

from __future__ import annotations

import json
import queue
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megatron_port.run.local_ranks import Meeting

LOST, RUNNING, HUNG, SLOW = "lost", "running", "hung", "slow"
"""Messages of a rank to its agent."""
START, END, REPLACED = "start", "end", "replaced"
"""Answers to a rank that left its step: meet the others again; the run ends; another process takes over."""
LEAVE = "leave"
"""Message to ranks in training when another is lost."""


@dataclass(frozen=True)
class Restart:
    """Why ranks start again, as the agent tells them."""

    number: int
    """From 1."""
    why: str
    lost_at: float
    """When the agent saw it, seconds since 1970."""
    step: int
    """Steps that had been done by then."""
    first_epoch: int
    """Epoch of the run folder's lease in which this job first trained; 0: it has not yet."""
    below: int = -1
    """Copies of this step and of later ones are not to be used, as a rank's state was damaged; negative: all are."""


class AgentLink:
    """A rank's connection to the process that forked it, one JSON text a line; read by a thread.

    Attributes:
        leave: called by that thread when another rank is lost, with the addresses of lost nodes: ends what this rank
            waits for.
        replaced: another process takes this rank over.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.leave: Callable[[Sequence[str]], None] = lambda lost: None
        self.replaced = False
        self._sending = threading.Lock()
        # The thread takes no signals: those that the main thread defers would end the process there.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        threading.Thread(target=self._read, name="agent", daemon=True).start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def running(self, step: int, epoch: int) -> None:
        """Tell that this rank has its state and trains from ``step`` on. ``epoch``: of the run folder's lease."""
        self._send(RUNNING, step=step, epoch=epoch)

    def hung(self, ranks: Sequence[int]) -> None:
        """Tell that the watch takes these ranks for hung."""
        self._send(HUNG, ranks=list(ranks))

    def slow(self, rank: int, ratio: float) -> None:
        """Tell that a rank's own work takes ``ratio`` times as long as its peers', more than the run allows."""
        self._send(SLOW, rank=rank, ratio=ratio)

    def lost(
        self, why: str, *, victim: bool, step: int, damaged_from: int = -1, keeps: bool = False
    ) -> tuple[Meeting, Restart] | None:
        """Report that this rank left a step, and wait. Return the next start's meeting; None: the run ends.

        ``victim``: a peer was lost; otherwise the fault is this rank's own, or all ranks' alike. ``damaged_from``: as
        :attr:`KeptRank.damaged_from`. ``keeps``: the next start of the job needs the copies.
        """
        self._send(LOST, why=why[:2000], victim=victim, step=step, damaged_from=damaged_from, keeps=keeps)
        told = self._answers.get()
        if told["kind"] != START:
            self.replaced = told["kind"] == REPLACED
            return None
        return Meeting.of(told["meeting"]), Restart(**told["recovery"])

    def _read(self) -> None:
        with suppress(OSError), self._sock.makefile("rb") as lines:
            for line in lines:
                told = json.loads(line)
                if told["kind"] == LEAVE:
                    with suppress(Exception):  # this thread must live: the answer comes through it
                        self.leave(told.get("nodes", ()))
                else:
                    self._answers.put(told)
        self._answers.put({"kind": END})  # the agent has ended

    def _send(self, kind: str, **values: Any) -> None:
        with suppress(OSError), self._sending:  # the agent ends its ranks when it ends
            self._sock.sendall(json.dumps({"kind": kind, **values}).encode() + b"\n")


@dataclass
class KeptRank:
    """A rank that an agent keeps."""

    link: AgentLink
    recovery: Restart | None = None
    """What this start recovers from; None: it is the first."""
    step: int = 0
    """Last step that this process knows of."""
    met_at: float = 0.0
    """When the ranks of this start had met and had their groups, seconds since 1970."""
    begun: bool = False
    """This process has trained."""
    damaged_from: int = -1
    """Something other than an update changed this rank's state: copies of this step and of later ones are not to be
    used. Negative: nothing did."""
