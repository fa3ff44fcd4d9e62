"""Attention of a sequence whose positions context-parallel ranks divide: each has queries, keys and values of its own
positions, and gets the result of its queries (:func:`context_attention`).

:class:`GatherKeys` gathers keys and values of all positions, as Llama 3 does (arXiv 2407.21783, section 3.3.2), and
puts them in the sequence's order: each query's softmax is then one call over the same keys in the same order as in one
process. They are kept for the backward pass as attention keeps its inputs; where attention is computed again there
(``recompute``), they are gathered again with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_port.core.dist.collectives import Group, all_gather_first, reduce_scatter_first
from megatron_port.core.dist.positions import Division, Positions, Run, SequencePartition
from megatron_port.core.errors import ConfigError
from megatron_port.core.layers.attention import Attention, AttentionMask, ContextAttention, DropoutOf, key_ends
from megatron_port.core.layers.fused import FirstOrderFunction, first_order
from megatron_port.core.layers.providers import Providers
from megatron_port.core.registry import PARTS


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, division: Division) -> torch.Tensor:
        ctx.group, ctx.division = group, division
        return division.in_sequence(all_gather_first(x, group))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return reduce_scatter_first(ctx.division.in_ranks(grad), ctx.group), None, None


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


# Attention of a sequence that ranks divide, by heads: each computes all positions of some heads (DeepSpeed-Ulysses,
# Jacobs et al., arXiv 2309.14509).
#
# One all-to-all brings queries, keys and values of all positions of a rank's heads, another brings the results back to
# the ranks of the positions. In between it is attention of whole sequences, with everything that its providers can do.

def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Give each rank its part of ``x`` [ranks, ...]; return theirs for this one, [ranks, ...]."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, x.contiguous(), group=group)
    return out


def _positions_to_heads(x: Tensor, group: dist.ProcessGroup, division: Division) -> Tensor:
    return division.in_sequence(_exchange(x, group).flatten(0, 1))


def _heads_to_positions(x: Tensor, group: dist.ProcessGroup, division: Division) -> Tensor:
    return _exchange(division.in_ranks(x).unflatten(0, (division.ranks, -1)), group)


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


# Which of another rank's keys the queries of this one see, in rows of both. Pure arithmetic; no processes.
#
# A rank's keys are runs of positions, in ascending order. What a query sees is one range of positions, hence one
# range of these rows; queries that are neighbours see ranges that cover a range as well, and keys outside of it cost
# nothing.

class KeyBlock(NamedTuple):
    """Rows of neighbouring queries, and the rows of keys of which each of them sees some or none, and no others."""

    first_query: int
    queries: int
    first_key: int
    keys: int


def rows_below(position: int, keys: Positions) -> int:
    """Return how many of the keys are before a position."""
    return sum(min(max(position - start, 0), length) for start, length in keys.runs)


def key_blocks(
    queries: Positions, keys: Positions, *, window: int = 0, earliest: Callable[[int], int] | None = None,
    longest: int = 0,
) -> list[KeyBlock]:
    """Return what queries see of keys at ``keys`` (ascending), a block for each run of queries that sees any.

    Runs of more than ``longest`` queries (0: any number) are cut: in a block, the first queries are computed with the
    keys of the last.
    ``window``: keys that a query sees at most, 0: any number; ``earliest(i)``: the first position that the query at
    position i may see in some sample, which must not fall with i (None: 0).
    """
    out, row = [], 0
    for start, length in _cut(queries, longest):
        low = max(earliest(start) if earliest else 0, start - window + 1 if window else 0)
        first, last = rows_below(low, keys), rows_below(start + length, keys)
        if first < last:
            out.append(KeyBlock(row, length, first, last - first))
        row += length
    return out


def _cut(positions: Positions, longest: int) -> list[Run]:
    """Return the runs, none longer than ``longest`` (0: any length)."""
    return [
        Run(start + at, min(longest or length, length - at))
        for start, length in positions.runs for at in range(0, length, longest or length)
    ]


def key_ranges(
    queries: Positions, keys: Positions, batch: int, device: torch.device, *, window: int = 0,
    starts: Tensor | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Return ``AttentionMask.first`` (None: 0) and ``end`` for queries and keys at these positions, in rows of keys.

    ``starts``: int32 [batch, seq], the first position of the document of each position of the sequence.
    """
    index = queries.index(device)
    low = None if starts is None else starts[:, index]
    if window:
        reach = (index - (window - 1)).expand(batch, -1)
        low = reach if low is None else torch.maximum(low, reach)
    return None if low is None else _count_below(low, keys), _count_below(index + 1, keys)


def _count_below(position: Tensor, keys: Positions) -> Tensor:
    """:func:`rows_below` of each position: int32, contiguous."""
    counts = [(position - start).clamp(0, length) for start, length in keys.runs]
    return sum(counts[1:], start=counts[0]).to(torch.int32).contiguous()


# Attention over a part of the keys, whose results add up to attention over all of them.
#
# A *partial* has, for each query, the weighted mean of the values that it sees among these keys, its largest score and
# the sum of exp(score - largest): of several, the results are the weighted mean of their means (Milakov & Gimelshein,
# arXiv 1805.02867; Liu et al., arXiv 2310.01889). All of it is float32, or float64 for float64, whatever the dtype of
# queries and keys: partials rounded to half precision are errors that every further part adds to.

Drop = Callable[[Tensor], Tensor]
"""Dropout of the probabilities [b, heads, queries, keys] of these queries and keys; the same each time."""


class Partial(NamedTuple):
    """Attention of some queries over some keys; of a query that sees none, zeros and a largest score of -inf."""

    out: Tensor
    """[queries, b, heads, d], wide; of a part that is only taken in, in any dtype."""
    top: Tensor
    """[b, heads, queries], wide: the largest score."""
    total: Tensor
    """[b, heads, queries], wide: sum of exp(score - top)."""

    def rows(self, first: int, count: int) -> Partial:
        """Return views of the queries from ``first`` on."""
        parts = self.top.narrow(2, first, count), self.total.narrow(2, first, count)
        return Partial(self.out.narrow(0, first, count), *parts)

    def add(self, other: Partial) -> None:
        """Take in the partial of the same queries over other keys, in place."""
        top = torch.maximum(self.top, other.top)
        base = finite_top(top)
        mine, theirs = (part.total * torch.exp(part.top - base) for part in (self, other))
        total = mine + theirs
        share = inverse_total(total)
        self.out.mul_(_by_row(mine * share)).add_(other.out * _by_row(theirs * share))
        self.top.copy_(top)
        self.total.copy_(total)

    def add_sinks(self, sinks: Tensor) -> None:
        """Take in a score [heads] for each query head that has no value, in place."""
        score = sinks.to(self.top.dtype).view(1, -1, 1)
        top = torch.maximum(self.top, score)
        mine = self.total * torch.exp(self.top - top)
        total = mine + torch.exp(score - top)
        self.out.mul_(_by_row(mine / total))
        self.top.copy_(top)
        self.total.copy_(total)

    def sink_gradient(self, sinks: Tensor, along: Tensor) -> Tensor:
        """Return the gradient [heads] of the sinks that were added. ``along``: see :func:`product_with_output`."""
        score = sinks.to(self.top.dtype).view(1, -1, 1)
        return -(torch.exp(score - self.top) / self.total * along).sum(dim=(0, 2))


class PartialAttention(Protocol):
    """Attention over some keys, and its backward pass, without autograd.

    q [queries, b, heads, d], k and v [keys, b, groups, d]; ``mask`` with ``end``, no sinks and no window (the window is
    in ``first``). Gradients are wide, unless ``by_runs``.
    """

    by_runs: bool
    """Whether it takes no ``end``: without ``AttentionMask.runs`` each query sees all keys, else query i the keys up
    to i, of as many as there are queries. It has no windows, documents, soft-caps and dropout."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, drop: Drop | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (out, top, total) of the partial of these keys (:class:`Partial`)."""

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: tuple[Tensor, Tensor, Tensor], along: Tensor,
        mask: AttentionMask, drop: Drop | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what these keys add to dq, dk and dv. ``whole``: (out, top, total) of all keys and the sinks;
        ``along`` [b, heads, queries]: dout times the result, summed over the elements of a head."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of partials."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def nothing_seen(q: Tensor) -> Partial:
    """Return the partial of no keys for queries [queries, b, heads, d]."""
    seq, batch, heads, _ = q.shape
    wide = wide_dtype(q.dtype)
    rows = torch.full((batch, heads, seq), float("-inf"), dtype=wide, device=q.device)
    return Partial(torch.zeros(q.shape, dtype=wide, device=q.device), rows, torch.zeros_like(rows))


def product_with_output(dout: Tensor, out: Tensor) -> Tensor:
    """Return dout times out, [queries, b, heads, d] both, summed over a head's elements: wide [b, heads, queries]."""
    wide = wide_dtype(out.dtype)
    return (dout.to(wide) * out.to(wide)).sum(dim=-1).permute(1, 2, 0)


def finite_top(top: Tensor) -> Tensor:
    """Largest scores with 0 for those of no key: -inf less -inf is not a number."""
    return top.masked_fill(top == float("-inf"), 0.0)


def inverse_total(total: Tensor) -> Tensor:
    return torch.where(total > 0, 1.0 / total, 0.0)


def _by_row(factor: Tensor) -> Tensor:
    """[b, heads, queries] as a factor of [queries, b, heads, d]."""
    return factor.permute(2, 0, 1).unsqueeze(-1)


class MathPartial:
    """Written out, in wide products."""

    by_runs = False

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, drop: Drop | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the partial, by products of all queries with all keys."""
        seq, batch, heads, size = q.shape
        scores, _ = self._scores(self._grouped(q, k.shape[2]), k, seq, mask)
        top = scores.amax(dim=-1)
        weights = torch.exp(scores - finite_top(top).unsqueeze(-1))
        total = weights.sum(dim=-1)
        weights = weights * inverse_total(total).unsqueeze(-1)
        weights = weights if drop is None else drop(weights)
        mixed = weights.view(batch, k.shape[2], -1, k.shape[0]) @ v.to(weights.dtype).permute(1, 2, 0, 3)
        return Partial(mixed.view(batch, heads, seq, size).permute(2, 0, 1, 3).contiguous(), top, total)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: tuple[Tensor, Tensor, Tensor], along: Tensor,
        mask: AttentionMask, drop: Drop | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients, by the same products once more."""
        _, top, total = whole
        groups, seq = k.shape[2], q.shape[0]
        query, grad = self._grouped(q, groups), self._grouped(dout, groups, scaled=False)
        scores, slope = self._scores(query, k, seq, mask)
        probs = torch.exp(scores - finite_top(top).unsqueeze(-1)) * inverse_total(total).unsqueeze(-1)
        dprobs = (grad @ v.to(grad.dtype).permute(1, 2, 3, 0)).view_as(probs)
        dropped = probs
        if drop is not None:
            dropped, dprobs = drop(probs), drop(dprobs)
        dscores = probs * (dprobs - along.unsqueeze(-1))
        dscores = (dscores if slope is None else dscores * slope).view(*query.shape[:3], -1)
        dv = dropped.view_as(dscores).mT @ grad
        dq = (dscores @ k.to(query.dtype).permute(1, 2, 0, 3)) / math.sqrt(q.shape[3])
        dk = dscores.mT @ query  # which carries the scale
        dq = dq.view(q.shape[1], q.shape[2], seq, -1).permute(2, 0, 1, 3)
        return dq, dk.permute(2, 0, 1, 3), dv.permute(2, 0, 1, 3)

    @staticmethod
    def _grouped(q: Tensor, groups: int, scaled: bool = True) -> Tensor:
        """[queries, b, heads, d] as wide [b, groups, heads of a group · queries, d]; scaled as queries are."""
        seq, batch, heads, size = q.shape
        wide = q.to(wide_dtype(q.dtype))
        wide = wide * (1.0 / math.sqrt(size)) if scaled else wide
        return wide.permute(1, 2, 0, 3).reshape(batch, groups, heads // groups * seq, size)

    @staticmethod
    def _scores(query: Tensor, k: Tensor, seq: int, mask: AttentionMask) -> tuple[Tensor, Tensor | None]:
        """Scores [b, heads, queries, keys], -inf where the query does not see the key; with a soft-cap also
        d(score)/d(uncapped score)."""
        scores = (query @ k.to(query.dtype).permute(1, 2, 3, 0)).view(query.shape[0], -1, seq, k.shape[0])
        slope = None
        if mask.softcap:
            bent = torch.tanh(scores / mask.softcap)
            scores, slope = mask.softcap * bent, 1.0 - bent.square()
        return scores.masked_fill(~mask.visible(seq, k.shape[0], scores.device), float("-inf")), slope


# Attention over a sequence that ranks divide, whose keys and values travel round (Liu et al., arXiv 2310.01889).
#
# Each rank keeps its queries. Keys and values go from rank to rank, one step while the attention over those at hand
# is computed; what each part gives is merged in float32 (float64 for float64), or queries would be rounded once per
# rank. In the backward pass keys and values travel again, and with them what each rank adds to their gradients, which
# arrives at the rank that they belong to one step later. Of the keys of others a rank holds those at hand and those
# that arrive.

class RingBlock(NamedTuple):
    """Queries and keys of which one product is made, what they see and what is dropped."""

    rows: KeyBlock
    mask: AttentionMask
    drop: Drop | None = None


Plan = Sequence[Sequence[RingBlock]]
"""Blocks that this rank's queries see, by the rank of the group that holds the keys."""


def context_attention(method: str, group: dist.ProcessGroup, providers: Providers) -> ContextAttention:
    """Return what a method (``layout.cp_method``) is on these context-parallel ranks.

    Raises:
        ConfigError: the provider of attention cannot serve the method.
    """
    if method != "ring":
        return (ExchangeHeads if method == "heads" else GatherKeys)(group, providers.attention)
    if not providers.partial_attention:
        raise ConfigError(
            'layout.cp_method "ring" needs partial results, which this provider of attention does not give; set '
            'backend.attention = "auto" or "math", or cp_method = "gather"'
        )
    return RingKeys(group, PARTS.function(providers.partial_attention)())


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
        keys = [replace(partition, rank=rank).held(seq) for rank in range(division.ranks)]
        if self.provider.by_runs:
            plan: Plan = [list(blocks_by_runs(held, asked, longest)) for asked in keys]
        else:
            plan = [list(ring_blocks(held, asked, q, mask, dropout_of, seq, longest)) for asked in keys]
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


def blocks_by_runs(queries: Positions, keys: Positions, longest: int) -> Iterator[RingBlock]:
    """Yield what queries see of keys at these positions under the causal mask alone, for a provider ``by_runs``: a
    block of the keys before the queries, and one of their own positions. Keys of other ranks are never in between."""
    for query, count, key, seen in key_blocks(queries, keys, longest=longest):
        start = queries.rows(query, 1).runs[0].start
        before = rows_below(start, keys) - key
        if before:
            yield RingBlock(KeyBlock(query, count, key, before), AttentionMask())
        if seen > before:
            yield RingBlock(KeyBlock(query, count, key + before, seen - before), AttentionMask(runs=((1, count),)))


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
                part = Partial(*provider.forward(query, keys[0], keys[1], mask, drop))
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
