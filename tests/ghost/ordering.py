"""Races between streams: memory that one stream writes and another touches with nothing that orders the two.

A vector clock for each stream and one for the host. A call starts after everything that the host had waited for when it
made the call; an event carries the clock of the stream that recorded it to the stream, or to the host, that waits for
it. Two calls are ordered when the later one's clock has reached the earlier one's place in its stream. Streams are
taken as torch creates them: without the legacy default stream's implicit waits.

Seen are copies, fills, collectives, products and kernels whose arguments are plain pointers (``kernels.cpp``). Of a
kernel's or a product's pointer only the first byte is known to be touched. What the host itself reads or writes in
pinned memory is not seen; freeing it is. Pure functions of a rank's log.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from machine import Event, RankLog

BLOCK = 21
"""Accesses are looked up by blocks of 2^21 bytes."""
MOST_FAULTS = 20
STEP_BEGINS, STEP_ENDS = "step begins", "step ends"
"""Marks around the step that is counted."""
PEAK = "peak "
"""How the mark after it begins, with the most bytes that the allocator had given out in the step."""
Clock = dict[str, int]


@dataclass(frozen=True)
class Access:
    """Memory that a call touches: bytes ``begin`` to ``end``."""

    begin: int
    end: int
    writes: bool

    def conflicts(self, other: Access) -> bool:
        """The two overlap, and one of them writes."""
        return self.begin < other.end and other.begin < self.end and (self.writes or other.writes)


@dataclass(frozen=True)
class Done:
    """An access by the call at place ``epoch`` of a stream."""

    access: Access
    stream: str
    epoch: int
    what: str


def accesses(event: Event) -> list[Access]:
    """Parse an event's memory."""
    found = []
    for word in event.memory.split():
        begin, _, size = word[1:].partition(":")
        start = int(begin, 16)
        found.append(Access(start, start + max(int(size), 1), word[0] == "w"))
    return found


def merge(into: Clock, other: Clock) -> None:
    """Raise a clock to at least another's."""
    for stream, epoch in other.items():
        into[stream] = max(into.get(stream, 0), epoch)


def describe(event: Event) -> str:
    """Return a call for people, with names cut."""
    return f"{event.kind} {event.detail[:90]}"


@dataclass
class History:
    """What has been touched, by block; of each stream and range only the latest read and write are kept."""

    blocks: dict[int, dict[tuple[str, int, int, bool], Done]] = field(default_factory=lambda: defaultdict(dict))

    def add(self, done: Done) -> None:
        """Remember an access."""
        a = done.access
        for block in range(a.begin >> BLOCK, ((a.end - 1) >> BLOCK) + 1):
            self.blocks[block][done.stream, a.begin, a.end, a.writes] = done

    def conflicting(self, access: Access) -> Iterator[Done]:
        """Yield earlier accesses that must be ordered before this one, each once."""
        seen: set[int] = set()
        for block in range(access.begin >> BLOCK, ((access.end - 1) >> BLOCK) + 1):
            for done in list(self.blocks.get(block, {}).values()):
                if id(done) not in seen and done.access.conflicts(access):
                    seen.add(id(done))
                    yield done

    def forget(self, access: Access) -> None:
        """Drop what lies in memory that was freed: the addresses may come again as something else."""
        for block in range(access.begin >> BLOCK, ((access.end - 1) >> BLOCK) + 1):
            held = self.blocks.get(block, {})
            for key in [k for k, done in held.items() if done.access.conflicts(access)]:
                del held[key]


@dataclass
class Order:
    """Clocks as a log is read from its beginning."""

    host: Clock = field(default_factory=dict)
    streams: dict[str, Clock] = field(default_factory=lambda: defaultdict(dict))
    events: dict[str, Clock] = field(default_factory=dict)

    def start(self, stream: str) -> tuple[Clock, int]:
        """A call starts on a stream: its clock, and its place in the stream."""
        clock = self.streams[stream]
        merge(clock, self.host)
        clock[stream] = clock.get(stream, 0) + 1
        return clock, clock[stream]

    def wait(self, event: Event) -> None:
        """The host waits, or asks and is told that it need not."""
        if event.detail in ("cudaEventSynchronize", "event"):
            merge(self.host, self.events.get(event.stream, {}))
        elif event.detail in ("cudaDeviceSynchronize", "cudaFree"):
            for clock in self.streams.values():
                merge(self.host, clock)
        else:
            merge(self.host, self.streams[event.stream])

    def take(self, event: Event) -> None:
        """Follow a call that orders others."""
        if event.kind in ("wait", "query"):
            self.wait(event)
        elif event.kind == "record":
            clock = self.streams[event.stream]
            merge(clock, self.host)
            self.events[event.detail] = dict(clock)
        elif event.kind == "await":
            merge(self.streams[event.stream], self.events.get(event.detail, {}))


def race_faults(log: RankLog) -> list[str]:
    """Return a sentence for each pair of calls of a rank that touch the same memory in no order, and for each buffer
    that is freed while a call that uses it may still run; at most ``MOST_FAULTS``, each pair of calls once."""
    order, history = Order(), History()
    found: dict[tuple[str, str], str] = {}
    for event in log.events:
        order.take(event)
        if event.kind == "free":
            place, address, size = event.detail.split()
            freed = Access(int(address, 16), int(address, 16) + max(int(size), 1), True)
            for done in history.conflicting(freed) if place == "pinned" else ():
                if order.host.get(done.stream, 0) < done.epoch:
                    found.setdefault(("free", done.what), f"pinned memory is freed while {done.what} on stream "
                                     f"{done.stream} may use it")
            history.forget(freed)  # cudaFree waits for the device
        elif touched := accesses(event):
            clock, epoch = order.start(event.stream)
            what = describe(event)
            for access in touched:
                for done in history.conflicting(access):
                    if clock.get(done.stream, 0) < done.epoch:
                        verb = "writes" if access.writes else "reads"
                        found.setdefault((done.what, what), f"{what} on stream {event.stream} {verb} {access.begin:x} "
                                         f"and nothing orders it after {done.what} on stream {done.stream}")
                history.add(Done(access, event.stream, epoch, what))
    return [f"rank {log.rank}: {fault}" for fault in list(found.values())[:MOST_FAULTS]]


def waits_between(log: RankLog, begin: str, end: str) -> list[str]:
    """Return the calls with which the host waited between two marks, which the program under test leaves in the log. A
    wait that follows another one at once (a copy to pageable memory and its synchronise) is part of it.

    Raises:
        ValueError: a mark is not there.
    """
    return _waits(between(log, begin, end))


def between(log: RankLog, begin: str, end: str) -> list[Event]:
    """Return the calls from the last mark ``begin`` to the last ``end``. Raises ValueError where a mark is missing."""
    marks = [event.detail if event.kind == "mark" else "" for event in reversed(log.events)]
    count = len(marks)
    return log.events[count - 1 - marks.index(begin) : count - 1 - marks.index(end)]


def _waits(events: list[Event]) -> list[str]:
    calls = [event for event in events if event.kind != "query"]  # of the watchdog's thread, at any time
    return [now.detail for before, now in zip(calls, calls[1:]) if now.kind == "wait" and before.kind != "wait"]


def wait_faults(log: RankLog, most: int = 1) -> list[str]:
    """Return a sentence for each marked step but the first in which the host waits more than ``most`` times: a wait in
    the middle keeps the device idle until the host has queued more. The first makes buffers, which may wait."""
    marks = [(i, event.detail) for i, event in enumerate(log.events) if event.kind == "mark"]
    begins = [i for i, text in marks if text == STEP_BEGINS]
    ends = [i for i, text in marks if text == STEP_ENDS]
    steps = [_waits(log.events[begin:end]) for begin, end in zip(begins, ends)]
    return [f"rank {log.rank}: the host waits {len(waits)} times in a step: {'; '.join(waits)}"
            for waits in steps[1:] if len(waits) > most]
