"""Attention over a sequence that ranks divide, whose keys and values travel round (Liu et al., arXiv 2310.01889).

Each rank keeps its queries. Keys and values go from rank to rank, one step while the attention over those at hand is
computed; what each part gives is merged in float32 (float64 for float64), or queries would be rounded once per rank. In
the backward pass keys and values travel again, and with them what each rank adds to their gradients, which arrives at
the rank that they belong to one step later. Of the keys of others a rank holds those at hand and those that arrive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_port.core.dist.positions import Positions, SequencePartition
from megatron_port.core.layers.context_attention import DropoutOf
from megatron_port.core.layers.direct import FirstOrderFunction, first_order
from megatron_port.core.layers.key_blocks import KeyBlock, key_blocks, key_ranges
from megatron_port.core.layers.mask import AttentionMask
from megatron_port.core.layers.partial_attention import (
    Drop,
    Partial,
    PartialAttention,
    nothing_seen,
    product_with_output,
    wide_dtype,
)


class RingBlock(NamedTuple):
    """Queries and keys of which one product is made, what they see and what is dropped."""

    rows: KeyBlock
    mask: AttentionMask
    drop: Drop | None = None


Plan = Sequence[Sequence[RingBlock]]
"""Blocks that this rank's queries see, by the rank of the group that holds the keys."""


class RingKeys:
    """Attention of a rank's queries to keys and values that go round. ``group``: the context-parallel ranks."""

    def __init__(self, group: dist.ProcessGroup, provider: PartialAttention) -> None:
        self.group, self.provider = group, provider

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, partition: SequencePartition, *, dropout_of: DropoutOf | None,
        mask: AttentionMask | None,
    ) -> Tensor:
        """Send the keys and values round, and merge what each part of them gives."""
        mask, seq = mask or AttentionMask(), partition.seq_length(q.shape[0])
        held = partition.held(seq)
        division = partition.division
        # In zigzag order the last rank's two chunks are neighbours: as one block they would cost it more than the
        # others' do, and twice the scores.
        longest = held.count // 2 if division.chunks > division.ranks else 0
        plan = [
            list(ring_blocks(held, replace(partition, rank=rank).held(seq), q, mask, dropout_of, seq, longest))
            for rank in range(division.ranks)
        ]
        out: Tensor = _RingAttention.apply(q, k, v, mask.sinks, self.group, self.provider, plan)
        return out


def ring_blocks(
    queries: Positions, keys: Positions, q: Tensor, mask: AttentionMask, dropout_of: DropoutOf | None,
    seq_length: int, longest: int,
) -> Iterator[RingBlock]:
    """Yield what queries ``q`` see of keys at these positions, under the ``mask`` of the whole sequence; ``longest``:
    see :func:`key_blocks`."""
    for rows in key_blocks(queries, keys, window=mask.window, earliest=mask.earliest, longest=longest):
        asking, asked = queries.rows(rows.first_query, rows.queries), keys.rows(rows.first_key, rows.keys)
        first, end = key_ranges(asking, asked, q.shape[1], q.device, window=mask.window, starts=mask.first)
        drop = None
        if dropout_of is not None:
            drop = dropout_of(asking, keys=asked, seq_length=seq_length).drop
        yield RingBlock(rows, AttentionMask(softcap=mask.softcap, first=first, end=end), drop)


class RingStep:
    """A tensor on its way to the next rank, and that of the previous one on its way here."""

    def __init__(self, x: Tensor, group: dist.ProcessGroup) -> None:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        self._sent, self._out = x, torch.empty_like(x)
        ahead, behind = (dist.get_global_rank(group, (rank + by) % size) for by in (1, -1))
        # One batch: on a GPU both are one launch, and ranks cannot deadlock by their order.
        self._works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, x, ahead, group), dist.P2POp(dist.irecv, self._out, behind, group)
        ])

    def take(self) -> Tensor:
        """Wait for both and return what arrived. On a GPU the stream waits, not the host."""
        for work in self._works:
            work.wait()
        del self._sent
        return self._out


class _RingAttention(FirstOrderFunction):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, group: dist.ProcessGroup,
        provider: PartialAttention, plan: Plan,
    ) -> Tensor:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        held, whole = torch.stack((k, v)), nothing_seen(q)
        for step in range(size):
            arriving = RingStep(held, group) if step < size - 1 else None
            for rows, mask, drop in plan[(rank - step) % size]:
                keys = held.narrow(1, rows.first_key, rows.keys)
                query = q.narrow(0, rows.first_query, rows.queries)
                part = provider.forward(query, keys[0], keys[1], mask, drop)
                whole.rows(rows.first_query, rows.queries).add(part)
            held = held if arriving is None else arriving.take()
        if sinks is not None:
            whole.add_sinks(sinks)
        out = whole.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, whole.top, whole.total)
        ctx.group, ctx.provider, ctx.plan = group, provider, plan
        return out.flatten(2)

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, top, total = ctx.saved_tensors
        dout = dout.view(out.shape)
        whole, along = Partial(out, top, total), product_with_output(dout, out)
        dq, dkv = _travel_back(ctx, dout, q, torch.stack((k, v)), whole, along)
        dsinks = None if sinks is None else whole.sink_gradient(sinks, along)
        dk, dv = dkv.to(k.dtype).unbind(0)
        return dq.to(q.dtype), dk, dv, dsinks, None, None, None


def _travel_back(
    ctx: Any, dout: Tensor, q: Tensor, held: Tensor, whole: Partial, along: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (dq, the gradients of this rank's keys and values), wide."""
    group, wide = ctx.group, wide_dtype(q.dtype)
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    dq = torch.zeros(q.shape, dtype=wide, device=q.device)
    passed: RingStep | None = None
    for step in range(size):
        arriving = RingStep(held, group) if step < size - 1 else None
        added = torch.zeros(held.shape, dtype=wide, device=q.device)
        for rows, mask, drop in ctx.plan[(rank - step) % size]:
            keys, query = held.narrow(1, rows.first_key, rows.keys), slice(rows.first_query, rows[0] + rows.queries)
            part = whole.rows(rows.first_query, rows.queries)
            grads = ctx.provider.backward(
                dout[query], q[query], keys[0], keys[1], part, along[..., query], mask, drop
            )
            dq[query] += grads[0]
            for total, grad in zip(added.narrow(1, rows.first_key, rows.keys), grads[1:], strict=True):
                total += grad
        if passed is not None:
            added += passed.take()  # what the ranks before this one added to the gradients of the same keys
        passed = RingStep(added, group)
        held = held if arriving is None else arriving.take()
    assert passed is not None
    return dq, passed.take()

