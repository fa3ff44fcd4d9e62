"""Which keys each query of attention sees, and what happens to the scores: one description for every provider.

A query sees one contiguous range of key rows, [low, high). Causality, a window and documents all give such a range, and
so do queries and keys that are other runs of positions than 0 to s - 1, as a divided sequence has them. A provider
honours all of a mask or is refused when a run starts (``kernels.attention_choice``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_port.core.dist.positions import Positions, SequencePartition
from megatron_port.core.layers.fused import CausalSoftmax, ProbabilityDropout, product, torch_causal_softmax, upcast


@dataclass(frozen=True)
class PackedKeys:
    """The keys of :class:`PackedDocuments` whose queries are not the whole sequence."""

    rows: Tensor
    """int64 [n]: rows of the keys, counted among batch · keys, document after document."""
    offsets: Tensor
    """int32 [documents + 1]: where those of each begin, and their number n."""
    longest: int


@dataclass(frozen=True)
class PackedDocuments:
    """The documents of a micro-batch, sample after sample, as kernels of variable lengths take them."""

    offsets: Tensor
    """int32 [documents + 1], on the device: where each begins among the batch · seq tokens, and their number."""
    longest: int
    """Tokens of the longest document."""
    keys: PackedKeys | None = None
    """None: the rows of the queries. Else a document is one run of queries, and its keys end with the last of them."""


@dataclass(frozen=True)
class AttentionMask:
    """Description of attention beyond the causal softmax; the default is nothing.

    Rows are those of the tensors. Where ``end`` is None, queries and keys are the same rows, and row i sees the keys up
    to i.
    """

    window: int = 0
    """Keys that a query sees at most, the last ones before ``end``; 0: any number."""
    softcap: float = 0.0
    """cap · tanh(score / cap) takes the place of each scaled score; 0: none."""
    sinks: Tensor | None = None
    """[heads of this rank]: a score for each query head that takes part in the softmax and has no value."""
    first: Tensor | None = None
    """int32 [batch, queries], contiguous: first key row that each query may see (where its document starts)."""
    end: Tensor | None = None
    """int32 [queries], contiguous: one more than the last key row that each query may see. May exceed the keys, or
    leave none: the query's result is then zeros."""
    runs: tuple[tuple[int, int], ...] | None = None
    """Runs of queries, which say on the host what ``end`` says: (``end`` of the first, number) of each
    in which every query sees one key more than the one before it."""
    documents: Callable[..., PackedDocuments] | None = None
    """Gives what ``first`` says for kernels that take documents as sequences of their own; made at the first call."""
    earliest: Callable[[int], int] | None = None
    """Gives the least ``first`` of a query over the batch, on the host; None: 0."""

    @property
    def ranges(self) -> bool:
        """Whether a query may see fewer keys than all up to its own."""
        return bool(self.window) or self.first is not None or self.end is not None

    def bounds(self, queries: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return (low, high), int64 [batch or 1, queries]: query i sees the key rows low[i] <= j < high[i].

        Raises:
            ValueError: ``end`` is None and there are not as many queries as keys.
        """
        if self.end is None:
            if queries != keys:
                raise ValueError(f"attention of {queries} queries and {keys} keys needs AttentionMask.end")
            end = torch.arange(1, queries + 1, device=device)[None]
        else:
            end = self.end.to(torch.int64)[None]
        low = torch.zeros_like(end) if self.first is None else self.first.to(torch.int64)
        if self.window:
            low = torch.maximum(low, end - self.window)
        return low, end.clamp(max=keys).expand_as(low)

    def visible(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """Return bool [batch or 1, 1, queries, keys]: the keys that each query sees."""
        low, high = self.bounds(queries, keys, device)
        key = torch.arange(keys, device=device)
        return ((key >= low[..., None]) & (key < high[..., None]))[:, None]


def key_ends(queries: Tensor, first_key: int = 0) -> Tensor:
    """Return ``AttentionMask.end`` for queries at these positions, int [queries], and keys that are neighbouring
    positions from ``first_key`` on. ``first``, which counts positions too, moves by as much."""
    return (queries + (1 - first_key)).to(torch.int32)


def masked_softmax(scores: Tensor, mask: AttentionMask) -> Tensor:
    """Softmax of scaled scores [b, heads, q, k] under a mask; see :func:`visible_softmax`."""
    visible = mask.visible(scores.shape[-2], scores.shape[-1], scores.device)
    if mask.end is None:
        return visible_softmax(scores, visible, softcap=mask.softcap, sinks=mask.sinks)
    blind = ~visible.any(dim=-1, keepdim=True)  # the softmax of nothing is not a number, nor are its gradients
    return visible_softmax(scores, visible | blind, softcap=mask.softcap, sinks=mask.sinks).masked_fill(blind, 0.0)


def visible_softmax(scores: Tensor, visible: Tensor, *, softcap: float = 0.0, sinks: Tensor | None = None) -> Tensor:
    """Softmax of scaled scores [b, heads, q, k] over the keys that are ``visible`` (bool, broadcast), at least one for
    each query; zero elsewhere.

    In fp32 (fp64 for fp64), soft-cap and sinks [heads] included; the result has the dtype of the scores.
    """
    wide = scores.to(torch.float64 if scores.dtype == torch.float64 else torch.float32)
    if softcap:
        wide = softcap * torch.tanh(wide / softcap)
    wide = wide.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        column = upcast(sinks).view(1, -1, 1, 1).expand(*wide.shape[:-1], 1)
        wide = torch.cat((wide, column), dim=-1)
    return torch.softmax(wide, dim=-1)[..., : scores.shape[-1]].to(scores.dtype)


# Providers of causal attention, all of one signature.
#
# ``attention(q, k, v, *, causal=True, dropout=None, mask=None)``: q [s, b, heads, d], k and v
# [s, b, kv_heads, d] → [s, b, heads * d], scores scaled by 1/sqrt(d). With grouped
# queries (arXiv 2305.13245), query head j uses key head j // (heads / kv_heads).
# ``mask`` (:class:`AttentionMask`): a window, documents, sinks, a soft-cap; a provider raises ValueError for what it
# lacks, which ``choose_attention`` refuses when a run starts.

class Attention(Protocol):
    """Attention of one layer; shapes as in the module's docstring."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True,
        dropout: ProbabilityDropout | None = None, mask: AttentionMask | None = None,
    ) -> torch.Tensor: ...


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


def check_shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, mask: AttentionMask | None = None
) -> None:
    """Raise ValueError unless the shapes fit together, and the mask with them."""
    if k.shape != v.shape or q.shape[1] != k.shape[1] or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
        raise ValueError(f"attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit together")
    if mask is not None and not causal:
        raise ValueError("attention that is not causal takes no AttentionMask")
    if causal and q.shape[0] != k.shape[0] and (mask is None or mask.end is None):
        raise ValueError(f"causal attention needs as many queries as keys, not {q.shape[0]} and {k.shape[0]}")


def math_attention_with(softmax: CausalSoftmax) -> Attention:
    """Attention written out: products in the input's dtype, softmax in fp32 (fp64 for fp64) by the provider given, or
    under a mask by torch."""

    def attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True,
        dropout: ProbabilityDropout | None = None, mask: AttentionMask | None = None,
    ) -> torch.Tensor:
        check_shapes(q, k, v, causal, mask)
        seq, batch, heads, size = q.shape
        keys, groups = k.shape[0], k.shape[2]
        rep = heads // groups
        # The query heads of a group stand below one another, so one product serves them and k is never repeated.
        # Scaled before the product: half-precision scores overflow later then.
        grouped = (q * (1.0 / math.sqrt(size))).permute(1, 2, 0, 3).reshape(batch, groups, rep * seq, size)
        scores = product(grouped, k.permute(1, 2, 3, 0)).view(batch, heads, seq, keys)
        if causal and mask is None:
            probs = softmax(scores, scale=1.0, dropout=dropout)
        else:
            probs = _softmax(scores) if mask is None else masked_softmax(scores, mask)
            probs = probs if dropout is None else dropout.drop(probs)
        out = product(probs.view(batch, groups, rep * seq, keys), v.permute(1, 2, 0, 3))
        return out.view(batch, heads, seq, size).permute(2, 0, 1, 3).reshape(seq, batch, heads * size)

    return attention


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    """Softmax over every key, in fp32 (fp64 for fp64); the result has the dtype of the scores."""
    wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
    return torch.softmax(scores, dim=-1, dtype=wide).to(scores.dtype)


math_attention = math_attention_with(torch_causal_softmax)
"""With torch's softmax."""
