"""Fused causal attention with grouped queries on a CPU (Dao et al., arXiv 2205.14135; groups: arXiv 2305.13245).

Arithmetic in fp32; fp32, fp16 and bf16 tensors. Scores and probabilities are made by blocks of queries and never
stored: q, k, v, the output and two floats a row are saved, and the backward pass makes the scores again, and with
dropout the mask. Products leave out the tiles that no query sees: under windows and within documents the work is
proportional to what the mask leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_port.core.layers.attention import AttentionMask
from megatron_port.core.layers.dropout import drop_threshold
from megatron_port.core.layers.fused import FirstOrderFunction, ProbabilityDropout, first_order, upcast

Dropout = tuple[Tensor | None, int, int, int]
"""(keys, op_key, threshold, head_offset) as the kernel takes them; no keys: no dropout."""


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, dropout: ProbabilityDropout | None = None,
    mask: AttentionMask | None = None,
) -> Tensor:
    """dropout(softmax(q kᵀ / sqrt(d))) v as [s, b, heads · d], of q [s, b, heads, d], k and v [keys, b, groups, d].

    Query head j uses key head j // (heads / groups). Any strides but in the last dimension. causal: row i sees the keys
    up to i, and s = keys, unless the mask says otherwise. A mask and dropout are for causal attention, dropout for keys
    of a whole sequence: the position of query i is ``mask.end[i] - 1``.

    Raises:
        RuntimeError: the shapes do not fit together, or dropout or a mask of attention that is not causal.
        ValueError: dropout of queries whose positions are not known.
    """
    out: Tensor = _Attention.apply(q, k, v, _sinks(mask), causal, _dropout(dropout, mask), mask)
    return out


def packed_attention(
    qkv: Tensor, *, dropout: ProbabilityDropout | None = None, mask: AttentionMask | None = None
) -> Tensor:
    """Causal attention of the packed projection [s, b, g, r + 2, d] (r query heads of a group, its key, its value) as
    [s, b, g · r · d]; the gradient is packed as well, so that none of q, k, v has to be put together."""
    out: Tensor = _PackedAttention.apply(qkv, _sinks(mask), _dropout(dropout), mask)
    return out


def partial_forward(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor]:
    """Return the kernel's own results, without autograd: out [s, b, groups, heads of a group, d], and the largest score
    and 1 / Σ exp(score - largest) of each query [b, groups, heads of a group, 2, s], both 0 where it sees no key."""
    out: tuple[Tensor, Tensor] = torch.ops.megatron_port.attention_forward.default(
        q.unflatten(2, (k.shape[2], -1)), k, v, k.shape[-1] ** -0.5, True, None, 0, 0, 0, mask.first, mask.end, None,
        0, mask.softcap,
    )
    return out


def partial_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, rows: Tensor, mask: AttentionMask
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what these keys add to dq, dk, dv, where ``out`` [s, b, heads, d] and ``rows`` [b, heads, 2, s] are those
    of more keys than these."""
    groups = k.shape[2]
    q, dout, out = (x.unflatten(2, (groups, -1)).contiguous() for x in (q, dout, out))
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    torch.ops.megatron_port.attention_backward_.default(
        dout, q, k, v, out, rows.unflatten(1, (groups, -1)).contiguous(), dq, dk, dv, k.shape[-1] ** -0.5, True, None,
        0, 0, 0, mask.first, mask.end, None, 0, mask.softcap, None,
    )
    return dq.flatten(2, 3), dk, dv


def _sinks(mask: AttentionMask | None) -> Tensor | None:
    """The sinks in fp32, in which the kernel sums their gradient."""
    return None if mask is None or mask.sinks is None else upcast(mask.sinks)


def _dropout(dropout: ProbabilityDropout | None, mask: AttentionMask | None = None) -> Dropout:
    if dropout is None or not (threshold := drop_threshold(dropout.p)):
        return None, 0, 0, 0
    if dropout.first_query != 0 and (mask is None or mask.end is None):
        raise ValueError(
            "own attention drops probabilities of a whole sequence or by AttentionMask.end, and the first query's "
            f"position is {dropout.first_query}; set backend.attention = \"math\""
        )
    return dropout.keys, dropout.op_key, threshold, dropout.head_offset


def _forward(
    ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, causal: bool, dropout: Dropout,
    mask: AttentionMask | None,
) -> tuple[Tensor, Tensor]:
    """Return (out, rows) of the kernel; ``ctx`` keeps what is no tensor of the graph. The ranges of keys are the
    micro-batch's own, and held by it."""
    ctx.scale, ctx.causal, ctx.dropout = k.shape[-1] ** -0.5, causal, dropout[1:]
    ctx.ranges = (None, None) if mask is None else (mask.first, mask.end)
    ctx.window, ctx.softcap = (0, 0.0) if mask is None else (mask.window, mask.softcap)
    out: tuple[Tensor, Tensor] = torch.ops.megatron_port.attention_forward.default(
        q, k, v, ctx.scale, causal, *dropout, *ctx.ranges, sinks, ctx.window, ctx.softcap
    )
    return out


def _backward(
    ctx: Any, dout: Tensor, inputs: tuple[Tensor, ...], saved: tuple[Any, ...], gradients: tuple[Tensor, ...]
) -> Tensor | None:
    """Fill the gradients of q, k and v; return that of the sinks. ``saved``: (out, rows, keys, sinks)."""
    out, rows, keys, sinks = saved
    dsinks = None if sinks is None else sinks.new_empty(dout.shape[1], sinks.numel())
    torch.ops.megatron_port.attention_backward_.default(
        dout.contiguous(), *inputs, out, rows, *gradients, ctx.scale, ctx.causal, keys, *ctx.dropout, *ctx.ranges,
        sinks, ctx.window, ctx.softcap, dsinks,
    )
    return None if dsinks is None else dsinks.sum(dim=0)


class OwnPartial:
    """Attention over parts of the keys (``context.attention.PartialAttention``) by the own CPU kernel on float32
    copies: its arithmetic is float32 whatever it is given."""

    by_runs = False

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, drop: Callable[[Tensor], Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the partial. ValueError: dropout, whose masks the kernel makes for whole sequences only."""
        _refuse_dropout(drop)
        out, rows = partial_forward(q.float(), k.float(), v.float(), mask)
        top, inverse = rows.flatten(1, 2).unbind(2)
        return out.flatten(2, 3), top.masked_fill(inverse == 0, float("-inf")), _inverse(inverse)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: tuple[Tensor, Tensor, Tensor], along: Tensor,
        mask: AttentionMask, drop: Callable[[Tensor], Tensor] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients. ValueError: dropout."""
        _refuse_dropout(drop)
        out, top, total = whole
        rows = torch.stack((top.masked_fill(top == float("-inf"), 0.0), _inverse(total)), dim=2)
        return partial_backward(dout.float(), q.float(), k.float(), v.float(), out.float(), rows, mask)


def _inverse(total: Tensor) -> Tensor:
    """1 / total, and 0 where a query sees no key."""
    return torch.where(total > 0, 1.0 / total, 0.0)


def _refuse_dropout(drop: Callable[[Tensor], Tensor] | None) -> None:
    if drop is not None:
        raise ValueError("own attention drops probabilities of whole sequences; set backend.attention = \"math\"")


class _Attention(FirstOrderFunction):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, causal: bool, dropout: Dropout,
        mask: AttentionMask | None,
    ) -> Tensor:
        q = q.unflatten(2, (k.shape[2], -1))
        out, rows = _forward(ctx, q, k, v, sinks, causal, dropout, mask)
        ctx.save_for_backward(q, k, v, out, rows, dropout[0], sinks)
        flat: Tensor = out.flatten(2)
        return flat

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *saved = ctx.saved_tensors
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        dsinks = _backward(ctx, dout, (q, k, v), tuple(saved), (dq, dk, dv))
        return dq.flatten(2, 3), dk, dv, dsinks, None, None, None


class _PackedAttention(FirstOrderFunction):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, sinks: Tensor | None, dropout: Dropout, mask: AttentionMask | None
    ) -> Tensor:
        out, rows = _forward(ctx, *_split(qkv), sinks, True, dropout, mask)
        ctx.save_for_backward(qkv, out, rows, dropout[0], sinks)
        flat: Tensor = out.flatten(2)
        return flat

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        qkv, *saved = ctx.saved_tensors
        gradient: Tensor = qkv.new_empty(qkv.shape)
        dsinks = _backward(ctx, dout, _split(qkv), tuple(saved), _split(gradient))
        return gradient, dsinks, None, None


def _split(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views [s, b, g, r, d] and [s, b, g, d] of [s, b, g, r + 2, d]."""
    heads = qkv.shape[3] - 2
    return qkv.narrow(3, 0, heads), qkv.select(3, heads), qkv.select(3, heads + 1)


def _forward_shapes(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, keys: Tensor | None = None, *rest: object
) -> tuple[Tensor, Tensor]:
    s, b, g, r, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((b, g, r, 2, s), dtype=torch.float32)


def _nothing(*_: object) -> None:
    return None


def register_attention() -> None:
    """Shapes of the ops, in torch's registry; the gradient is the functions' above."""
    torch.library.register_fake("megatron_port::attention_forward", _forward_shapes)
    torch.library.register_fake("megatron_port::attention_backward_", _nothing)
