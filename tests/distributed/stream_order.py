"""Happens-before checker: accesses of several streams to the same memory that nothing orders.

A vector clock for each stream and one for the host (Lamport 1978, doi:10.1145/359545.359563; Fidge 1988). The program
runs as it is, on a CPU; what it states in ``dist.device_streams`` (accesses, events, waits) is followed as if every
stream ran beside the others. Work that is queued starts after everything that the host has done or waited for. An
event carries the clock of its stream to whoever waits for it. Two accesses are ordered when the clock of the later one
has reached the place of the earlier one in its stream; if they overlap, one of them writes, and nothing orders them,
that is a race, whether or not this run would have shown it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatron_port.core.dist.device_streams import HOST

Clock = dict[str, int]


class StreamRace(RuntimeError):
    """Two accesses to the same memory that nothing orders."""


@dataclass(frozen=True)
class _Access:
    begin: int
    end: int
    writes: bool
    stream: str
    place: int
    """Position in its stream."""
    what: str

    def __str__(self) -> str:
        return f"{self.what} (stream {self.stream}, {'writes' if self.writes else 'reads'})"

    def overlaps(self, other: _Access) -> bool:
        return self.begin < other.end and other.begin < self.end

    def inside(self, other: _Access) -> bool:
        return other.begin <= self.begin and self.end <= other.end


@dataclass
class _Memory:
    """Accesses to one storage that a later one must still be compared with; the storage stays alive, so that its
    addresses do not come again as something else."""

    storage: torch.UntypedStorage
    accesses: list[_Access] = field(default_factory=list)


class OrderChecker:
    """Observer of ``dist.device_streams`` that raises :class:`StreamRace` at the later of two unordered accesses.

    It keeps the memory of every tensor that it has seen alive: for tests and short runs.
    """

    def __init__(self) -> None:
        self.clocks: dict[str, Clock] = {}
        self.counted: dict[str, int] = {}
        """Accesses seen, by stream."""
        self._memory: dict[int, _Memory] = {}

    def record(self, stream: str) -> Clock:
        """Return the clock of a stream's work so far."""
        return dict(self._clock(stream))

    def wait(self, stream: str, mark: object) -> None:
        """Order what comes on a stream after a clock that :meth:`record` returned."""
        assert isinstance(mark, dict)
        _merge(self._clock(stream), mark)

    def access(
        self, stream: str, what: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        """Follow one piece of work.

        Raises:
            StreamRace: nothing orders it after an earlier access to the same memory; both are named.
        """
        clock = self._clock(stream)
        place = clock[stream] = clock.get(stream, 0) + 1
        self.counted[stream] = place
        for tensors, writing in ((reads, False), (writes, True)):
            for tensor in tensors:
                if tensor.numel():
                    begin = tensor.data_ptr()
                    new = _Access(begin, begin + _extent(tensor), writing, stream, place, what)
                    self._follow(tensor.untyped_storage(), new, clock)

    def _clock(self, stream: str) -> Clock:
        """The clock of a stream, brought up to the host's: what is queued now starts after what the host has done."""
        clock = self.clocks.setdefault(stream, {})
        if stream != HOST:
            _merge(clock, self.clocks.setdefault(HOST, {}))
        return clock

    def _follow(self, storage: torch.UntypedStorage, new: _Access, clock: Clock) -> None:
        memory = self._memory.setdefault(storage.data_ptr(), _Memory(storage))
        kept = []
        for old in memory.accesses:
            same_work = old.stream == new.stream and old.place == new.place
            if not same_work and old.overlaps(new) and (old.writes or new.writes):
                if clock.get(old.stream, 0) < old.place:
                    raise StreamRace(f"nothing orders {new} after {old}: bytes {max(old.begin, new.begin):#x} to "
                                     f"{min(old.end, new.end):#x}")
                if new.writes and old.inside(new):
                    continue  # whoever is ordered after the new access is ordered after this one
            elif old.stream == new.stream and old.writes == new.writes and old.inside(new):
                continue
            kept.append(old)
        memory.accesses = [*kept, new]


def _merge(into: Clock, other: Mapping[str, int]) -> None:
    for stream, place in other.items():
        into[stream] = max(into.get(stream, 0), place)


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to its last, both included."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return elements * tensor.element_size()
