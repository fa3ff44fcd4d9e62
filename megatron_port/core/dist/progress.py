"""What a rank is doing right now, for whoever watches: plain attributes, written by the main thread, read by another.

Engines, the loop, the loader and checkpoints emit spans here; they know nothing of who reads them. A call costs less
than a microsecond and never a system call, a lock or a device synchronisation, so it may stand in a schedule's inner
loop. A reader may see a new phase beside an old operation; nothing but a log line depends on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
