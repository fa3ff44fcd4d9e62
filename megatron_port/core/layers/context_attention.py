"""Attention of a sequence whose positions context-parallel ranks divide: each has queries, keys and values of its own
positions, and gets the result of its queries.

:class:`ContextAttention` is what a method is; ``layers.head_attention`` and ``layers.ring_attention`` have others.
:class:`GatherKeys` gathers keys and values of all positions, as Llama 3 does (arXiv 2407.21783, section 3.3.2), and
puts them in the sequence's order: each query's softmax is then one call over the same keys in the same order as in one
process. They are kept for the backward pass as attention keeps its inputs; where attention is computed again there
(``recompute``), they are gathered again with it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_port.core.dist.collectives import Group, all_gather_first, reduce_scatter_first
from megatron_port.core.dist.positions import Division, Positions, Run, SequencePartition
from megatron_port.core.layers.fused import ProbabilityDropout
from megatron_port.core.layers.fused_attention import Attention
from megatron_port.core.layers.mask import AttentionMask, key_ends


class DropoutOf(Protocol):
    """Dropout of any of a layer's probabilities: of queries at these positions, from this rank's head ``first_head``
    on. ``keys``: positions of the columns in a sequence of ``seq_length``; None: all of it."""

    def __call__(
        self, queries: Positions, *, first_head: int = 0, keys: Positions | None = None, seq_length: int = 0
    ) -> ProbabilityDropout: ...


class ContextAttention(Protocol):
    """A method of context parallelism."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, partition: SequencePartition, *,
        dropout_of: DropoutOf | None, mask: AttentionMask | None,
    ) -> torch.Tensor:
        """Return the result [held, batch, heads/tp · d] of this rank's queries. Collective.

        q [held, batch, heads/tp, d], k and v [held, batch, groups/tp, d]; ``mask``: of the whole sequence, None where
        it is causal and no more.
        """


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, division: Division) -> torch.Tensor:
        ctx.group, ctx.division = group, division
        return in_order(all_gather_first(x, group), division)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return reduce_scatter_first(by_rank(grad, ctx.division), ctx.group), None, None


def in_order(x: torch.Tensor, division: Division) -> torch.Tensor:
    """Return the rows of all positions in the sequence's order from those of the ranks, one rank's after another's:
    [seq, ...] → same."""
    return x if division.in_order else _rearranged(x, division.chunks, division.to_sequence)


def by_rank(x: torch.Tensor, division: Division) -> torch.Tensor:
    """Return the rows of the ranks, one rank's after another's, from those of all positions in the sequence's order."""
    return x if division.in_order else _rearranged(x, division.chunks, division.to_ranks)


def _rearranged(x: torch.Tensor, chunks: int, runs: tuple[Run, ...]) -> torch.Tensor:
    rows = x.shape[0] // chunks
    return torch.cat([x.narrow(0, run.start * rows, run.length * rows) for run in runs])


def gather_positions(x: torch.Tensor, group: dist.ProcessGroup | None, division: Division) -> torch.Tensor:
    """Return the rows of all positions, in the sequence's order: [held, ...] → [seq, ...]; gradients are summed."""
    return x if group is None else _Gather.apply(x, group, division)  # type: ignore[no-untyped-call]


def mask_of_rows(mask: AttentionMask | None, held: Positions, device: torch.device) -> AttentionMask:
    """Return the mask of queries at the ``held`` positions and keys at all, from the whole sequence's."""
    mask = mask or AttentionMask()
    return replace(
        mask, end=key_ends(held.index(device)), runs=tuple((start + 1, length) for start, length in held.runs),
        first=None if mask.first is None else held.take(mask.first, dim=1).contiguous(),
        documents=None if mask.documents is None else partial(mask.documents, held),
    )


class GatherKeys:
    """Attention of a rank's queries to the keys of all positions, which are gathered.

    ``group``: the context-parallel ranks.
    """

    def __init__(self, group: dist.ProcessGroup, attention: Attention) -> None:
        self.group, self.attention = group, attention

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, partition: SequencePartition, *,
        dropout_of: DropoutOf | None, mask: AttentionMask | None,
    ) -> torch.Tensor:
        """Gather the keys and values, and attend to them."""
        held = partition.held(partition.seq_length(q.shape[0]))
        keys, values = (gather_positions(x, self.group, partition.division) for x in (k, v))
        dropout = None if dropout_of is None else dropout_of(held)
        return self.attention(q, keys, values, dropout=dropout, mask=mask_of_rows(mask, held, q.device))
