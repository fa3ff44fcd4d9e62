"""SIGINT, SIGTERM and SIGUSR1 ask the loop to save and stop; they do not interrupt a step.

| level | signal | sent by | afterwards |
|---|---|---|---|
| 1 | SIGUSR1 | the batch script before the time limit | save, exit 85: queue me again |
| 2 | SIGTERM | the scheduler or a person | save, exit 0 |
| 3 | SIGINT | a person at the terminal | save, exit 130 |

The highest level wins, whatever the order: a job that is cancelled after it was told to save must not come back. A
signal reaches some ranks earlier than others, or only some: the loop makes the ranks agree (a max over
:attr:`StopRequest.level`) before it acts.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from megatron_port.core.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_REQUEUE

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
