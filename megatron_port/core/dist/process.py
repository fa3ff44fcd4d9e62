"""Signals that a rank obeys, and what it is doing right now."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from megatron_port.core.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_REQUEUE

# SIGINT, SIGTERM and SIGUSR1 ask the loop to save and stop; they do not interrupt a step.
#
# | level | signal | sent by | afterwards |
# |---|---|---|---|
# | 1 | SIGUSR1 | the batch script before the time limit | save, exit 85: queue me again |
# | 2 | SIGTERM | the scheduler or a person | save, exit 0 |
# | 3 | SIGINT | a person at the terminal | save, exit 130 |
#
# The highest level wins, whatever the order: a job that is cancelled after it was told to save must not come back. A
# signal reaches some ranks earlier than others, or only some: the loop makes the ranks agree (a max over
# :attr:`StopRequest.level`) before it acts.

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
LEVELS = {signal.SIGUSR1: 1, signal.SIGTERM: 2, signal.SIGINT: 3}
EXIT_CODES = (EXIT_OK, EXIT_REQUEUE, EXIT_OK, EXIT_INTERRUPTED)
"""By level, of a run that stopped before its end."""


def name_of(level: int) -> str:
    """Return the name of a level's signal: ``SIGUSR1`` for 1; empty for 0."""
    return next((number.name for number, own in LEVELS.items() if own == level), "")


class StopRequest:
    """A flag that signals raise and the loop polls. Use as a context manager, in the main thread.

    After the first SIGINT the system's default is restored, so that a second one ends
    the process at once (the shell sees 130), even from inside a collective that hangs.
    """

    def __init__(self) -> None:
        self._level = 0
        self._before: dict[signal.Signals, Any] = {}

    @property
    def signal_name(self) -> str | None:
        """Name of the signal with the highest level; None: no signal came."""
        return name_of(self._level) or None

    @property
    def level(self) -> int:
        """0: continue; otherwise that of ``LEVELS``. The ranks' maximum is what all do."""
        return self._level

    def request(self, number: int = signal.SIGINT) -> None:
        """Ask as a signal would."""
        self._level = max(self._level, LEVELS[signal.Signals(number)])

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.request(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def __enter__(self) -> StopRequest:
        """Take over the signals; ValueError outside of the main thread."""
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("signal handlers can be installed in the main thread only")
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # what block_signals() kept arrives now
        return self

    def __exit__(self, *error: object) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()


def block_signals() -> None:
    """Keep a scheduler's signals (not Ctrl-C) until a :class:`StopRequest` is installed, so that one that comes while
    a run starts up makes it save and stop instead of killing it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1))


def ignore_in_child() -> None:
    """For helper processes (loader workers): srun and scancel signal every process of a step, and these must live."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, so that no rank is left behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


# What a rank is doing right now, for whoever watches: plain attributes, written by the main thread, read by another.
#
# Engines, the loop, the loader and checkpoints emit spans here; they know nothing of who reads them. A call costs less
# than a microsecond and never a system call, a lock or a device synchronisation, so it may stand in a schedule's inner
# loop. A reader may see a new phase beside an old operation; nothing but a log line depends on it.

START, STEP, EVALUATE, SAVE, END = "start", "step", "evaluate", "save", "end"
"""Scopes: what the loop is at. Deadlines are by scope."""
DATA, FORWARD, BACKWARD, OPTIMIZER = "data", "forward", "backward", "optimizer"
TRANSFER, REDUCE = "transfer", "reduce"
"""Waits for other ranks: neighbouring stages, collectives."""
COMMUNICATOR = "communicator"
"""First word of START's operation while the groups' communicators are made: no rank continues before all have."""
IDLE = "idle"
PHASES = (DATA, FORWARD, BACKWARD, TRANSFER, REDUCE, OPTIMIZER)
"""Phases of a step whose seconds are summed."""
WAITING = (TRANSFER, REDUCE)
OWN = (DATA, FORWARD, BACKWARD)
"""Phases that are a rank's own work. (The update is left out: its gradient norm is a collective.)"""


class ProgressTracker:
    """The state of one rank. ``clock`` gives seconds and never goes back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.scope, self.phase, self.operation, self.number = START, START, "", -1
        self.step = 0
        """Optimizer steps done when the current one began."""
        self.counter = 0
        """Grows with every span; standing still is no progress."""
        self.since = clock()
        """When the counter last grew (of ``clock``)."""
        self.steps_done = 0
        """Steps that this process has taken."""
        self.step_seconds = 0.0
        """Wall time of those steps."""
        self.totals = dict.fromkeys(PHASES, 0.0)
        """Seconds by phase over those steps."""
        self.last_seconds = dict.fromkeys(PHASES, 0.0)
        """Seconds by phase of the last step."""
        self._seconds = dict.fromkeys((*PHASES, START, EVALUATE, SAVE, END, IDLE), 0.0)
        self._began = self.since

    def at(self, phase: str, operation: str = "", number: int = -1) -> None:
        """A phase begins. ``operation``: its last known operation, ``number``: of the micro-batch or sample."""
        now = self._clock()
        self._seconds[self.phase] += now - self.since
        self.phase, self.operation, self.number = phase, operation, number
        self.since = now
        self.counter += 1

    def tick(self, operation: str, number: int = -1) -> None:
        """Progress within a phase."""
        self.at(self.phase, operation, number)

    def begin_step(self, step: int) -> None:
        """An optimizer step begins, after ``step`` others."""
        self.at(IDLE)
        self.step, self._began = step, self.since
        if self.scope != START:  # the first step belongs to the start: kernels load, connections are made
            self.scope = STEP
        seconds = self._seconds
        for phase in PHASES:
            seconds[phase] = 0.0

    def end_step(self) -> None:
        """The optimizer step is done."""
        self.at(IDLE)
        seconds, totals, last = self._seconds, self.totals, self.last_seconds
        for phase in PHASES:
            totals[phase] += seconds[phase]
            last[phase] = seconds[phase]
        self.step_seconds += self.since - self._began
        self.step += 1
        self.scope = STEP
        self.steps_done += 1

    @contextmanager
    def enter(self, scope: str, operation: str = "") -> Iterator[None]:
        """Enter another scope for a while: ``with progress.enter("save"): …``. Spans inside keep their own phases."""
        before, self.scope = self.scope, scope
        self.at(scope if scope in (EVALUATE, SAVE) else IDLE, operation)
        yield
        self.scope = before  # after an error what was under way stays readable
        self.at(IDLE)

    def doing(self) -> str:
        """Return ``backward, micro-batch 3``: phase and last operation."""
        return describe(self.phase, self.operation, self.number)


def describe(phase: str, operation: str, number: int) -> str:
    """Return ``transfer, activation of micro-batch 3``."""
    what = f"{operation} {number}" if operation and number >= 0 else operation
    return f"{phase}, {what}" if what and what != phase else phase
