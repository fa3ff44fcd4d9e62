"""Attention over a part of the keys, whose results add up to attention over all of them.

A *partial* has, for each query, the weighted mean of the values that it sees among these keys, its largest score and
the sum of exp(score - largest): of several, the results are the weighted mean of their means (Milakov & Gimelshein,
arXiv 1805.02867; Liu et al., arXiv 2310.01889). All of it is float32, or float64 for float64, whatever the dtype of
queries and keys: partials rounded to half precision are errors that every further part adds to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_port.core.layers.mask import AttentionMask

Drop = Callable[[Tensor], Tensor]
"""Dropout of the probabilities [b, heads, queries, keys] of these queries and keys; the same each time."""


@dataclass
class Partial:
    """Attention of some queries over some keys; of a query that sees none, zeros and a largest score of -inf."""

    out: Tensor
    """[queries, b, heads, d], wide."""
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
        base = _finite(top)
        mine, theirs = (part.total * torch.exp(part.top - base) for part in (self, other))
        total = mine + theirs
        share = _inverse(total)
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
        return -(torch.exp(score - self.top) / self.total * along).sum(dim=(0, 2)).to(sinks.dtype)


class PartialAttention(Protocol):
    """Attention over some keys, and its backward pass, without autograd.

    q [queries, b, heads, d], k and v [keys, b, groups, d]; ``mask`` with ``end``, no sinks and no window (the window is
    in ``first``). Gradients are wide.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, drop: Drop | None) -> Partial:
        """Return the partial of these keys."""

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Partial, along: Tensor, mask: AttentionMask,
        drop: Drop | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what these keys add to dq, dk and dv. ``whole``: of all keys and the sinks; ``along`` [b, heads,
        queries]: dout times the result, summed over the elements of a head."""


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


def _finite(top: Tensor) -> Tensor:
    """Largest scores with 0 for those of no key: -inf less -inf is not a number."""
    return top.masked_fill(top == float("-inf"), 0.0)


def _inverse(total: Tensor) -> Tensor:
    return torch.where(total > 0, 1.0 / total, 0.0)


def _by_row(factor: Tensor) -> Tensor:
    """[b, heads, queries] as a factor of [queries, b, heads, d]."""
    return factor.permute(2, 0, 1).unsqueeze(-1)


class MathPartial:
    """Written out, in wide products."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, drop: Drop | None) -> Partial:
        """Return the partial, by products of all queries with all keys."""
        seq, batch, heads, size = q.shape
        scores, _ = self._scores(self._grouped(q, k.shape[2]), k, seq, mask)
        top = scores.amax(dim=-1)
        weights = torch.exp(scores - _finite(top).unsqueeze(-1))
        total = weights.sum(dim=-1)
        weights = weights * _inverse(total).unsqueeze(-1)
        weights = weights if drop is None else drop(weights)
        mixed = weights.view(batch, k.shape[2], -1, k.shape[0]) @ v.to(weights.dtype).permute(1, 2, 0, 3)
        return Partial(mixed.view(batch, heads, seq, size).permute(2, 0, 1, 3).contiguous(), top, total)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Partial, along: Tensor, mask: AttentionMask,
        drop: Drop | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients, by the same products once more."""
        groups, seq = k.shape[2], q.shape[0]
        query, grad = self._grouped(q, groups), self._grouped(dout, groups, scaled=False)
        scores, slope = self._scores(query, k, seq, mask)
        probs = torch.exp(scores - _finite(whole.top).unsqueeze(-1)) * _inverse(whole.total).unsqueeze(-1)
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


class OwnPartial:
    """The own CPU kernel on float32 copies: its arithmetic is float32 whatever it is given."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, drop: Drop | None) -> Partial:
        """Return the partial. ValueError: dropout, whose masks the kernel makes for whole sequences only."""
        from megatron_port.ext.kernels.ops.attention import partial_forward

        _refuse_dropout(drop)
        out, rows = partial_forward(q.float(), k.float(), v.float(), mask)
        top, inverse = rows.flatten(1, 2).unbind(2)
        return Partial(out.flatten(2, 3), top.masked_fill(inverse == 0, float("-inf")), _inverse(inverse))

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Partial, along: Tensor, mask: AttentionMask,
        drop: Drop | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients. ValueError: dropout."""
        from megatron_port.ext.kernels.ops.attention import partial_backward

        _refuse_dropout(drop)
        rows = torch.stack((_finite(whole.top), _inverse(whole.total)), dim=2)
        return partial_backward(dout.float(), q.float(), k.float(), v.float(), whole.out.float(), rows, mask)


PARTIALS: Mapping[str, PartialAttention] = {"math": MathPartial(), "own": OwnPartial()}
"""By the name of the provider of attention."""


def _refuse_dropout(drop: Drop | None) -> None:
    if drop is not None:
        raise ValueError("own attention drops probabilities of whole sequences; set backend.attention = \"math\"")
