"""Faults that the calls of all ranks together show: communicators that never meet, operations that nobody answers.

Pure functions of the logs. Each returns sentences; none means that nothing was found.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from machine import RankLog
from ordering import race_faults, wait_faults

POINT_TO_POINT = ("send", "receive")


@dataclass(frozen=True)
class Operation:
    """One NCCL call. ``peer``: the root or the other rank, by its rank in the communicator; -1: none."""

    kind: str
    count: int
    dtype: int
    peer: int

    def __str__(self) -> str:
        peer = f" {'to' if self.kind == 'send' else 'from'} {self.peer}" if self.peer >= 0 else ""
        return f"{self.kind} of {self.count} (dtype {self.dtype}){peer}"


@dataclass
class Communicator:
    """What each of its ranks asked for, as a list of batches: the operations of a group are started together."""

    size: int
    batches: dict[int, list[list[Operation]]] = field(default_factory=lambda: defaultdict(list))
    ranks: dict[int, int] = field(default_factory=dict)
    """Rank in the communicator → rank of the run."""


def communicators(logs: list[RankLog]) -> dict[str, Communicator]:
    """Every communicator by name."""
    out: dict[str, Communicator] = {}
    for log in logs:
        grouped: dict[str, list[Operation]] | None = None
        for event in log.events:
            if event.kind == "communicator begins":
                name, size, rank = event.detail.split()
                out.setdefault(name, Communicator(int(size))).ranks[int(rank)] = log.rank
            elif event.kind == "nccl group":
                grouped = {} if event.detail == "begins" else None
            elif event.kind == "nccl":
                name, rank, kind, count, dtype, peer, _ = event.detail.split()
                operation = Operation(kind, int(count), int(dtype), int(peer))
                batches = out[name].batches[int(rank)]
                if grouped is None:
                    batches.append([operation])
                elif name in grouped:
                    grouped[name].append(operation)
                else:
                    grouped[name] = [operation]
                    batches.append(grouped[name])
    return out


def stream_priorities(log: RankLog) -> dict[str, set[int]]:
    """Return the priorities of the streams that a rank's communicators ran on, in the order of their creation.

    Streams that were made without one, as the default stream, are left out.
    """
    made: dict[str, int] = {}
    out: dict[str, set[int]] = {}
    for event in log.events:
        if event.kind == "stream":
            made[event.stream] = int(event.detail)
        elif event.kind == "communicator begins":
            out[event.detail.split()[0]] = set()
        elif event.kind == "nccl" and event.stream in made:
            out[event.detail.split()[0]].add(made[event.stream])
    return out


def meeting_faults(logs: list[RankLog]) -> list[str]:
    """Communicators that their ranks begin in orders that block for ever.

    A communicator is made when all its ranks have come to it; each rank makes one at a time.
    """
    queues = {log.rank: [e.detail.split()[0] for e in log.events if e.kind == "communicator begins"] for log in logs}
    sizes = {e.detail.split()[0]: int(e.detail.split()[1])
             for log in logs for e in log.events if e.kind == "communicator begins"}
    moved = True
    while moved:
        moved = False
        heads = {rank: queue[0] for rank, queue in queues.items() if queue}
        for name in set(heads.values()):
            waiting = [rank for rank, head in heads.items() if head == name]
            if len(waiting) == sizes[name]:
                for rank in waiting:
                    queues[rank].pop(0)
                moved = True
    return [f"rank {rank} waits for ever in the communicator {queue[0]} of {sizes[queue[0]]} ranks"
            for rank, queue in queues.items() if queue]


def operation_faults(logs: list[RankLog]) -> list[str]:
    """Operations that the ranks of a communicator do not ask for alike, or in an order in which none can end.

    The operations of a communicator run in the order of the calls, batch by batch: a collective when all ranks have
    come to it, a message when both ends are in the batch that their ranks have come to.
    """
    return [fault for name, c in communicators(logs).items() for fault in _faults_of(name, c)]


def _faults_of(name: str, c: Communicator) -> list[str]:
    missing = [r for r in range(c.size) if r not in c.ranks]
    if missing:
        return [f"communicator {name}: {len(missing)} of its {c.size} ranks have no log"]
    queues = {rank: [list(batch) for batch in c.batches[rank]] for rank in range(c.size)}
    while _advance(queues):
        pass
    return [
        f"communicator {name}, rank {c.ranks[rank]}: {'; '.join(map(str, queue[0]))} is never answered "
        f"({len(queue)} batches left)" for rank, queue in queues.items() if queue
    ]


def _advance(queues: dict[int, list[list[Operation]]]) -> bool:
    """Run what can run; whether anything did."""
    moved = False
    heads = {rank: queue[0] for rank, queue in queues.items() if queue}
    whole = [{op for op in heads.get(rank, []) if op.kind not in POINT_TO_POINT} for rank in queues]
    for op in set.intersection(*whole):
        for rank in queues:
            heads[rank].remove(op)
        moved = True
    for source in heads:
        # An exchange of uneven parts also sends a rank its own.
        for op in [op for op in heads[source] if op.kind == "send"]:
            answer = Operation("receive", op.count, op.dtype, source)
            if answer in heads.get(op.peer, []):
                heads[source].remove(op)
                heads[op.peer].remove(answer)
                moved = True
    for queue in queues.values():
        while queue and not queue[0]:
            queue.pop(0)
            moved = True
    return moved


def launch_faults(logs: list[RankLog]) -> list[str]:
    """Launches that no GPU of this kind accepts."""
    return [f"rank {log.rank}: illegal launch {e.detail}" for log in logs for e in log.events
            if e.kind == "illegal launch"]


def faults(logs: list[RankLog], *, most_waits: int | None = 1) -> list[str]:
    """All of the above, and of each rank the races between its streams and the steps in which the host waits more often
    than ``most_waits`` (``ordering``); None: as often as it likes."""
    late = [] if most_waits is None else [fault for log in logs for fault in wait_faults(log, most_waits)]
    alone = [fault for log in logs for fault in race_faults(log)] + late
    return [*meeting_faults(logs), *operation_faults(logs), *launch_faults(logs), *alone]
