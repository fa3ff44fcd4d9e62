"""The ghost machine's analysis finds planted faults in logs of ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "ghost"))

from analyse import faults, meeting_faults, operation_faults
from machine import Event, RankLog

Lines = list[str]


def logs(*ranks: Lines) -> list[RankLog]:
    """``kind detail`` lines of each rank."""
    out = []
    for rank, lines in enumerate(ranks):
        events = []
        for line in lines:
            kind, _, detail = line.partition("|")
            events.append(Event(kind, "0", detail))
        out.append(RankLog(rank, events))
    return out


def batch(*operations: str) -> Lines:
    """Operations of one NCCL group."""
    return ["nccl group|begins", *(f"nccl|{op} 1" for op in operations), "nccl group|ends"]


def pipeline(rank: int) -> Lines:
    """Two stages: activations on ``a``, gradients on ``g``, a sum over both."""
    peer = 1 - rank
    start = [f"communicator begins|{name} 2 {rank}" for name in "ag"]
    forward = batch(f"a {rank} {'send' if rank == 0 else 'receive'} 64 9 {peer}")
    backward = batch(f"g {rank} {'receive' if rank == 0 else 'send'} 64 9 {peer}")
    return [*start, *forward, *forward, *backward, *backward, f"nccl|a {rank} all_reduce 1 7 -1 0"]


def test_a_right_step_has_no_faults() -> None:
    assert faults(logs(pipeline(0), pipeline(1))) == []


def swapped_groups(lines: Lines) -> Lines:
    return [lines[1], lines[0], *lines[2:]]


def without_a_send(lines: Lines) -> Lines:
    return lines[:2] + lines[5:]


def other_size(lines: Lines) -> Lines:
    return [line.replace("send 64", "send 32") for line in lines]


def other_dtype(lines: Lines) -> Lines:
    return [line.replace("all_reduce 1 7", "all_reduce 1 9") for line in lines]


def sum_before_messages(lines: Lines) -> Lines:
    return [*lines[:2], lines[-1], *lines[2:-1]]


@pytest.mark.parametrize(("change", "says"), [
    (swapped_groups, "waits for ever in the communicator"),
    (without_a_send, "receive of 64 (dtype 9) from 0 is never answered"),
    (other_size, "send of 32 (dtype 9) to 1 is never answered"),
    (other_dtype, "all_reduce of 1 (dtype 9) is never answered"),
    (sum_before_messages, "all_reduce of 1 (dtype 7) is never answered"),
], ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_fault_is_found(change: Callable[[Lines], Lines], says: str) -> None:
    found = faults(logs(change(pipeline(0)), pipeline(1)))
    assert found and says in " ".join(found)


def test_messages_of_one_batch_may_cross() -> None:
    both = [batch(f"a {r} send 8 9 {1 - r}", f"a {r} receive 8 9 {1 - r}") for r in (0, 1)]
    start = [[f"communicator begins|a 2 {r}"] for r in (0, 1)]
    assert operation_faults(logs(start[0] + both[0], start[1] + both[1])) == []
    one_by_one = [batch(f"a {r} send 8 9 {1 - r}") + batch(f"a {r} receive 8 9 {1 - r}") for r in (0, 1)]
    assert len(operation_faults(logs(start[0] + one_by_one[0], start[1] + one_by_one[1]))) == 2


def test_a_rank_that_never_came_and_an_illegal_launch_are_named() -> None:
    alone = logs(["communicator begins|a 2 0", "illegal launch|0,1,1 64 0 k"])
    assert meeting_faults(alone) == ["rank 0 waits for ever in the communicator a of 2 ranks"]
    assert "1 of its 2 ranks have no log" in faults(alone)[1] and "illegal launch 0,1,1" in faults(alone)[2]
