"""Attention of a sequence that ranks divide, by heads: each computes all positions of some heads (DeepSpeed-Ulysses,
Jacobs et al., arXiv 2309.14509).

One all-to-all brings queries, keys and values of all positions of a rank's heads, another brings the results back to
the ranks of the positions. In between it is attention of whole sequences, with everything that its providers can do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_port.core.dist.positions import Division, Positions, SequencePartition
from megatron_port.core.layers.context_attention import DropoutOf, by_rank, in_order
from megatron_port.core.layers.direct import FirstOrderFunction, first_order
from megatron_port.core.layers.fused_attention import Attention
from megatron_port.core.layers.mask import AttentionMask


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Give each rank its part of ``x`` [ranks, ...]; return theirs for this one, [ranks, ...]."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, x.contiguous(), group=group)
    return out


def _positions_to_heads(x: Tensor, group: dist.ProcessGroup, division: Division) -> Tensor:
    return in_order(_exchange(x, group).flatten(0, 1), division)


def _heads_to_positions(x: Tensor, group: dist.ProcessGroup, division: Division) -> Tensor:
    return _exchange(by_rank(x, division).unflatten(0, (division.ranks, -1)), group)


class _ToHeads(FirstOrderFunction):
    """[ranks of the heads, held, ...] → [seq, ...] of this rank's heads, in the sequence's order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, division: Division) -> Tensor:
        ctx.arguments = group, division
        return _positions_to_heads(x, group, division)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _heads_to_positions(grad, *ctx.arguments), None, None


class _ToPositions(FirstOrderFunction):
    """[seq, ...] of this rank's heads → [ranks of the heads, held, ...]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, division: Division) -> Tensor:
        ctx.arguments = group, division
        return _heads_to_positions(x, group, division)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _positions_to_heads(grad, *ctx.arguments), None, None


def _by_ranks(x: Tensor, ranks: int) -> Tensor:
    """[held, batch, heads, d] as a view [ranks, held, batch, heads of each, d]; where there are fewer heads than ranks,
    as many neighbours get the same."""
    held, batch, heads, size = x.shape
    if heads < ranks:
        x = x.unsqueeze(3).expand(held, batch, heads, ranks // heads, size).flatten(2, 3)
    parts: Tensor = x.unflatten(2, (ranks, -1))
    return parts.movedim(2, 0)


class ExchangeHeads:
    """Attention of all positions over the heads of a rank. ``group``: the context-parallel ranks, whose number divides
    the key/value heads of a rank, or is a multiple of them and divides the query heads."""

    def __init__(self, group: dist.ProcessGroup, attention: Attention) -> None:
        self.group, self.attention = group, attention

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, partition: SequencePartition, *, dropout_of: DropoutOf | None,
        mask: AttentionMask | None,
    ) -> Tensor:
        """Exchange positions for heads, attend, and exchange back."""
        division = partition.division
        parts = [_by_ranks(x, division.ranks) for x in (q, k, v)]
        heads = [part.shape[3] for part in parts]
        qkv: Tensor = _ToHeads.apply(torch.cat(parts, dim=3), self.group, division)
        first = partition.rank * heads[0]
        if mask is not None and mask.sinks is not None:
            mask = replace(mask, sinks=mask.sinks.narrow(0, first, heads[0]))
        dropout = None
        if dropout_of is not None:
            dropout = dropout_of(Positions.contiguous(qkv.shape[0]), first_head=first)
        out = self.attention(*qkv.split(heads, dim=2), dropout=dropout, mask=mask)
        back: Tensor = _ToPositions.apply(out, self.group, division)
        return back.movedim(0, 2).flatten(2)
