"""What a rank and the agent of its node tell each other. Torch is not imported: the agent sets threads before that."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

LOST, RUNNING = "lost", "running"
"""What a rank tells its agent."""
START, END = "start", "end"
"""What the agent answers a rank that lost its peers."""


@dataclass(frozen=True)
class Recovery:
    """Why ranks start again, as the agent tells them."""

    number: int
    """From 1."""
    why: str
    lost_at: float
    """When the agent saw it, seconds since 1970."""
    step: int
    """Steps that had been done by then."""


class AgentLink:
    """A rank's connection to the agent of its node, one JSON text a line."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._unread = b""

    def running(self, step: int) -> None:
        """Tell that this rank has its state and trains from ``step`` on."""
        self._send(RUNNING, step=step)

    def lost(self, why: str, *, victim: bool, step: int) -> tuple[int, Recovery] | None:
        """Report that this rank left a step, and wait. Return (port, recovery) of the next start; None: the run ends.

        ``victim``: a peer was lost; otherwise the fault is this rank's own, or all ranks' alike.
        """
        self._send(LOST, why=why[:2000], victim=victim, step=step)
        while b"\n" not in self._unread:
            data = self._sock.recv(1 << 16)
            if not data:
                return None
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        told = json.loads(line)
        if told["kind"] == END:
            return None
        recovery = Recovery(int(told["number"]), str(told["why"]), float(told["lost_at"]), int(told["step"]))
        return int(told["port"]), recovery

    def _send(self, kind: str, **values: Any) -> None:
        with suppress(OSError):  # the agent ends its ranks when it ends
            self._sock.sendall(json.dumps({"kind": kind, **values}).encode() + b"\n")


@dataclass
class KeptRank:
    """A rank that an agent keeps."""

    link: AgentLink
    recovery: Recovery | None = None
    """What this start recovers from; None: it is the first."""
    step: int = 0
    """Last step that this process knows of."""
    begun: bool = False
    """This process has trained."""
    damaged: bool = False
    """Something other than an update changed this rank's state."""
