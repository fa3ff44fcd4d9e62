"""SIGINT, SIGTERM and SIGUSR1 ask the loop to save and stop; they do not interrupt a step.

| signal | sent by | afterwards |
|---|---|---|
| SIGINT | a person | save, exit 0 |
| SIGTERM | the scheduler or a person | save, exit 0 |
| SIGUSR1 | the batch script before the time limit | save, exit 85: queue me again |

A signal reaches some ranks earlier than others, or only some: the loop makes the
ranks agree (a max over :attr:`StopRequest.level`) before it acts.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """A flag that signals raise and the loop polls. Use as a context manager, in the main thread.

    After the first SIGINT the system's default is restored, so that a second one ends
    the process at once (the shell sees 130), even from inside a collective that hangs.
    """

    def __init__(self) -> None:
        self._first: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """A signal arrived (or :meth:`request` was called)."""
        return self._first is not None

    @property
    def signal_name(self) -> str | None:
        """Of the first signal."""
        return None if self._first is None else self._first.name

    @property
    def requeue(self) -> bool:
        """The job wants to be queued again (SIGUSR1 came first)."""
        return self._first == signal.SIGUSR1

    @property
    def level(self) -> int:
        """0: go on, 1: save and stop, 2: save and ask for a requeue. The ranks' maximum is what all do."""
        return 0 if self._first is None else 2 if self.requeue else 1

    def request(self, number: int = signal.SIGINT) -> None:
        """Ask as a signal would. The first wins."""
        if self._first is None:
            self._first = signal.Signals(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.request(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def install(self) -> StopRequest:
        """Take over the signals; ValueError outside of the main thread."""
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("signal handlers can be installed in the main thread only")
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # what hold() kept arrives now
        return self

    def restore(self) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def __enter__(self) -> StopRequest:
        return self.install()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.restore()


def hold() -> None:
    """Keep a scheduler's signals (not Ctrl-C) until a :class:`StopRequest` is installed, so that one that comes while
    a run starts up makes it save and stop instead of killing it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1))


def ignore_in_child() -> None:
    """For helper processes (loader workers): srun and scancel signal every process of a step, and these must live."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
