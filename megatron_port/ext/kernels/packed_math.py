"""Attention written out in products that read the packed projection and write its packed gradient.

For GPUs where no fused kernel serves, as under attention dropout with large heads. Queries, keys and values are strided
batches of a matrix for each head in the projection [s, b, h, 3, d], the output is one in [s, b, h, d]; products take
and fill those as they are. So nothing is split, scaled, laid out anew or put together: of
``attention.math_attention_with`` these are a pass over the queries and one over the output each way, and one over the
three gradients.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megatron_port.core.layers.attention import AttentionMask, masked_softmax, math_attention_with
from megatron_port.core.layers.fused import CausalSoftmax, PackedAttention, ProbabilityDropout, SplitRotary, first_order


def _heads(packed: Tensor) -> list[Tensor]:
    """Queries, keys and values as views [b · h, s, d] of [s, b, h, 3, d]."""
    return [part.transpose(0, 1) for part in packed.flatten(1, 2).unbind(2)]


class _Gradient:
    """Packed gradient that the two halves of a backward pass fill."""

    packed: Tensor | None = None


class _Scores(torch.autograd.Function):
    """q kᵀ / sqrt(d) of each head, [b · h, s, s]."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, gradient: _Gradient) -> Tensor:
        ctx.save_for_backward(qkv)
        ctx.gradient, ctx.scale = gradient, 1.0 / math.sqrt(qkv.shape[-1])
        q, k, _ = _heads(qkv)
        scores = qkv.new_empty(q.shape[0], q.shape[1], q.shape[1])
        # Scaled inside of the product: half-precision scores overflow later than those scaled after it.
        return torch.baddbmm(scores, q, k.mT, beta=0.0, alpha=ctx.scale, out=scores)

    @staticmethod
    @first_order
    def backward(ctx: Any, dscores: Tensor) -> tuple[Tensor | None, None]:
        (qkv,) = ctx.saved_tensors
        packed, ctx.gradient.packed = ctx.gradient.packed, None
        assert packed is not None, "the output's gradient comes before that of the scores"
        (q, k, _), (dq, dk, _) = _heads(qkv), _heads(packed)
        torch.baddbmm(dq, dscores, k, beta=0.0, alpha=ctx.scale, out=dq)
        torch.baddbmm(dk, dscores.mT, q, beta=0.0, alpha=ctx.scale, out=dk)
        return packed, None


class _Mix(torch.autograd.Function):
    """Probabilities [b, h, s, s] times values, [s, b, h · d]. The values' gradient goes into the packed one."""

    @staticmethod
    def forward(ctx: Any, probs: Tensor, qkv: Tensor, gradient: _Gradient) -> Tensor:
        ctx.save_for_backward(probs, qkv)
        ctx.gradient = gradient
        seq, batch, heads, _, size = qkv.shape
        out = qkv.new_empty(seq, batch * heads, size)
        torch.bmm(probs.flatten(0, 1), _heads(qkv)[2], out=out.transpose(0, 1))
        return out.view(seq, batch, heads * size)

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
        probs, qkv = ctx.saved_tensors
        seq, batch, heads, _, size = qkv.shape
        grad = dout.contiguous().view(seq, batch * heads, size).transpose(0, 1)
        ctx.gradient.packed = packed = torch.empty_like(qkv)
        torch.bmm(probs.flatten(0, 1).mT, grad, out=_heads(packed)[2])
        return torch.bmm(grad, _heads(qkv)[2].mT).view(probs.shape), None, None


def packed_math_attention(softmax: CausalSoftmax, split: SplitRotary) -> PackedAttention:
    """Return the attention of packed projections; grouped queries, whose heads are no one batch, are split first."""
    separate = math_attention_with(softmax)

    def attention(
        qkv: Tensor, *, dropout: ProbabilityDropout | None = None, mask: AttentionMask | None = None
    ) -> Tensor:
        seq, batch, groups, rows, _ = qkv.shape
        if rows != 3:
            return separate(*split(qkv, None, None), dropout=dropout, mask=mask)
        gradient = _Gradient()
        scores: Tensor = _Scores.apply(qkv.contiguous(), gradient)  # type: ignore[no-untyped-call]
        scores = scores.view(batch, groups, seq, seq)
        if mask is None:
            probs = softmax(scores, scale=1.0, dropout=dropout)
        else:
            probs = masked_softmax(scores, mask)
            probs = probs if dropout is None else dropout.drop(probs)
        out: Tensor = _Mix.apply(probs, qkv.contiguous(), gradient)  # type: ignore[no-untyped-call]
        return out

    return attention
