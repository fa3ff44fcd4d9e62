"""Providers of causal attention, all of one signature.

``attention(q, k, v, *, causal=True, dropout=None, mask=None)``: q [s, b, heads, d], k and v
[s, b, kv_heads, d] → [s, b, heads * d], scores scaled by 1/sqrt(d). With grouped
queries (arXiv 2305.13245), query head j uses key head j // (heads / kv_heads).
``mask`` (:class:`AttentionMask`): a window, documents, sinks, a soft-cap; a provider raises ValueError for what it
lacks, which ``choose_attention`` refuses when a run starts.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch

from megatron_port.core.dist.positions import Positions, SequencePartition
from megatron_port.core.layers.attention import AttentionMask, masked_softmax
from megatron_port.core.layers.fused import CausalSoftmax, ProbabilityDropout, product, torch_causal_softmax


class Attention(Protocol):
    """Attention of one layer; shapes as in the module's docstring."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: bool = True,
        dropout: ProbabilityDropout | None = None,
        mask: AttentionMask | None = None,
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
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: bool = True,
        dropout: ProbabilityDropout | None = None,
        mask: AttentionMask | None = None,
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
