"""The ranks that save together, and how they agree that a stage went well.

A rank that failed must not leave the others waiting: after each stage all ranks
meet in one small all-reduce; if any failed, all raise the same message, the
first failed rank's. The text travels as bytes, not as a pickle.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_port.core.dist.agreement import TEXT_CHARACTERS, broadcast_text
from megatron_port.core.errors import CheckpointError, PortError

T = TypeVar("T")


class Peers:
    """Ranks that save together: here a single process; derived classes meet others."""

    rank = 0
    """Number of this rank, 0 to world_size - 1."""
    world_size = 1

    def first_failure(self, message: str | None) -> str | None:
        """Meet the others. ``message``: what failed here, or None. Return the lowest failing rank's, or None."""
        return message

    def maximum(self, values: Sequence[int]) -> list[int]:
        """Return the element-wise maximum of every rank's integers, as many from each."""
        return list(values)


class GroupPeers(Peers):
    """Peers of a process group whose backend takes CPU tensors (gloo, or cpu:gloo,cuda:nccl)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def first_failure(self, message: str | None) -> str | None:
        """Return the first failure by one all-reduce of an integer; on failure also its text is broadcast."""
        flag = self.maximum([self.world_size - self.rank if message is not None else 0])[0]
        if flag == 0:
            return None
        own = None if message is None else message[:TEXT_CHARACTERS]
        return broadcast_text(own, source=self.world_size - flag, group=self._group)

    def maximum(self, values: Sequence[int]) -> list[int]:
        """Return the maximum by one all-reduce."""
        flags = torch.tensor(list(values), dtype=torch.int64)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        return [int(v) for v in flags.tolist()]


def peers_of(group: dist.ProcessGroup | None) -> Peers:
    """Return the ranks of a group, or this process alone."""
    return Peers() if group is None or dist.get_world_size(group) == 1 else GroupPeers(group)


def failure_text(peers: Peers, error: Exception) -> str:
    """Return what went wrong on this rank, for all to read."""
    text = str(error) if isinstance(error, PortError) else f"{type(error).__name__}: {error}"
    return f"rank {peers.rank} on {socket.gethostname()}: {text}" if peers.world_size > 1 else text


def together(peers: Peers, action: Callable[[], T]) -> T:
    """Run a stage on every rank, then agree on it.

    Raises:
        CheckpointError: it failed on some rank, with that rank's number, host and message.
        Exception: a bug in this rank's action comes through as it is, after the others were told.
    """
    result: T | None = None
    error: Exception | None = None
    try:
        result = action()
    except Exception as caught:  # whatever it is, the other ranks must hear of it
        error = caught
    first = peers.first_failure(None if error is None else failure_text(peers, error))
    if error is not None and not isinstance(error, PortError):
        raise error
    if first is not None:
        raise CheckpointError(first) from error
    return result  # type: ignore[return-value]
