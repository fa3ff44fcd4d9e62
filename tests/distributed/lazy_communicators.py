"""NCCL's way of making communicators, over gloo: late, blocking, and by all ranks of a group at once.

Without a device bound to the default group, torch makes a group's communicator at its first operation, in a call that
returns when every rank of the group has made the same call (``ncclCommInitRank``). The first message between two ranks
blocks both in the same way while their connection is made; messages of one batch are connected together. gloo does
neither, so an order of first uses that differs between ranks passes there and hangs on GPUs.

``emulate`` patches this process for good; use it on ranks that are forked for one test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVES = ("allreduce", "broadcast", "reduce", "allgather", "_allgather_base", "allgather_into_tensor_coalesced",
               "reduce_scatter", "_reduce_scatter_base", "alltoall_base", "gather", "scatter", "barrier")
TOKEN_TAG, ANSWER_TAG = 7001, 7002


class LazyCommunicators:
    """What has been made so far on this rank, in order: ranks of a group, ``source -> target`` of a pair."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self._groups: set[str] = set()
        self._pairs: set[tuple[str, int, int]] = set()
        self._barrier = dist.ProcessGroup.barrier
        self._send, self._receive = dist.ProcessGroup.send, dist.ProcessGroup.recv

    def enter(self, group: dist.ProcessGroup) -> None:
        """Make the communicator of a group, unless it is there: wait for all its ranks."""
        if group is dist.group.WORLD or group.group_name in self._groups:
            return
        self._groups.add(group.group_name)
        self.made.append(str(dist.get_process_group_ranks(group)))
        self._barrier(group).wait()

    def connect(self, ops: Sequence[dist.P2POp]) -> None:
        """Make the connections that a batch of messages needs: wait for each peer to ask for the same."""
        works = []
        for op in ops:
            group = op.group
            assert group is not None
            self.enter(group)
            mine, peer = group.rank(), dist.get_group_rank(group, op.peer)
            out = op.op is dist.isend
            pair = (group.group_name, mine, peer) if out else (group.group_name, peer, mine)
            if pair in self._pairs:
                continue
            self._pairs.add(pair)
            self.made.append(f"{pair[1]} -> {pair[2]} of {dist.get_process_group_ranks(group)}")
            first, second = (TOKEN_TAG, ANSWER_TAG) if out else (ANSWER_TAG, TOKEN_TAG)
            works.append(self._send(group, [torch.zeros(1)], peer, first))
            works.append(self._receive(group, [torch.zeros(1)], peer, second))
        for work in works:
            work.wait()


def emulate() -> LazyCommunicators:
    """Let every group of this process but the default one behave so, and call itself ``nccl``."""
    state = LazyCommunicators()

    def lazily(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            state.enter(group)
            return real(group, *args, **kwargs)

        return call

    for name in COLLECTIVES:
        setattr(dist.ProcessGroup, name, lazily(getattr(dist.ProcessGroup, name)))

    def batch(ops: list[dist.P2POp]) -> list[dist.Work]:
        state.connect(ops)
        works = [op.op(op.tensor, op.peer, group=op.group) for op in ops]
        return [work for work in works if work is not None]

    dist.batch_isend_irecv = batch  # type: ignore[assignment]
    dist.get_backend = lambda group=None: dist.Backend("nccl")  # type: ignore[assignment]
    return state
