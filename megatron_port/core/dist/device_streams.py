"""Events of a device's streams, and an observer of the memory that queued operations read and write.

Work on one stream runs in the order in which it was queued; work on two streams runs in no order unless one waits for
an event of the other. ``HOST`` is the program itself: it waits for an event by blocking, and what is queued on any
stream is queued after everything that the host has done or waited for.

On a CPU nothing runs beside the program, so nothing has to wait. An observer is told of every event, wait and access
on either device; that of the tests (tests/distributed/stream_order.py) so checks on a CPU what a GPU would do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
import torch.distributed as dist

COMPUTE = "compute"
"""The stream of the model's kernels: the device's current one."""
HOST = "host"
"""The program: what it reads and writes itself in host memory."""


class Observer(Protocol):
    """Sees stream accesses in program order, to detect races."""

    def access(self, stream: str, what: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """Work is queued on a stream that touches these tensors."""

    def record(self, stream: str) -> object:
        """Return a mark of everything that is queued on a stream so far."""

    def wait(self, stream: str, mark: object) -> None:
        """Make what is queued on ``stream`` from here on run after a mark."""


# On a CPU one thread states every access, those of backward passes and of saves too: a context variable sees all.
_OBSERVERS: ContextVar[tuple[Observer, ...]] = ContextVar("observers of streams", default=())


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Tell ``observer`` of all accesses that this thread states while the context lasts."""
    before = _OBSERVERS.set((*_OBSERVERS.get(), observer))
    try:
        yield
    finally:
        _OBSERVERS.reset(before)


def access(stream: str, what: str, *, reads: Sequence[torch.Tensor] = (), writes: Sequence[torch.Tensor] = ()) -> None:
    """State what work on a stream touches. Costs the look at an empty tuple where nobody observes."""
    for observer in _OBSERVERS.get():
        observer.access(stream, what, reads, writes)


def is_observed() -> bool:
    """Return whether an observer is attached, for callers to whom collecting the tensors costs something."""
    return bool(_OBSERVERS.get())


class Event:
    """Mark in a stream. It is made once and recorded again and again; before the first time it stands for nothing."""

    def __init__(self, native: Any = None) -> None:
        self.native = native
        self._marks: list[tuple[Observer, object]] = []

    def record(self, stream: str) -> None:
        """Tell the observers that the event now marks a stream's work so far."""
        self._marks = [(observer, observer.record(stream)) for observer in _OBSERVERS.get()]

    def wait(self, stream: str) -> None:
        """Tell the observers that a stream waits for the event."""
        for observer, mark in self._marks:
            observer.wait(stream, mark)


def host_waits_for(stream: str) -> None:
    """State that the host has just waited for all of a stream's work."""
    if is_observed():
        event = Event()
        event.record(stream)
        event.wait(HOST)


class _ObservedWork:
    """A collective in flight, which tells the observers when the compute stream waits for it."""

    def __init__(self, work: dist.Work, event: Event, stream: str) -> None:
        self._work, self._event, self._stream = work, event, stream

    def wait(self, *arguments: Any) -> Any:
        done = self._work.wait(*arguments)
        self._event.wait(self._stream)
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def in_flight(
    work: dist.Work, what: str, *, reads: Sequence[torch.Tensor] = (), writes: Sequence[torch.Tensor] = (),
    queue: str = "communicator", after: str = COMPUTE,
) -> dist.Work:
    """Return ``work``, an asynchronous collective or transfer that has just been started, and state what it touches.

    Args:
        queue: what runs one after the other: a communicator's stream.
        after: the stream that was current at the start, whose work so far the communicator waits for.
    """
    if not is_observed():
        return work
    started, ended = Event(), Event()
    started.record(after)
    started.wait(queue)
    access(queue, what, reads=reads, writes=writes)
    ended.record(queue)
    return _ObservedWork(work, ended, COMPUTE)  # type: ignore[return-value]  # it is used as one
