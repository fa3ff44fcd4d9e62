"""Fused causal attention with grouped queries on a CPU (Dao et al., arXiv 2205.14135; groups: arXiv 2305.13245).

Arithmetic in fp32; fp32, fp16 and bf16 tensors. Scores and probabilities are made by blocks of queries and never
stored: q, k, v, the output and two floats a row are saved, and the backward pass makes the scores again, and with
dropout the mask. Products leave out the tiles above the diagonal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_port.backend.direct import FirstOrderFunction, first_order
from megatron_port.backend.fused import ProbabilityDropout
from megatron_port.backend.ops.dropout import drop_threshold

Mask = tuple[Tensor | None, int, int, int]
"""(keys, op_key, threshold, head_offset) as the kernel takes them; no keys: no dropout."""


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, dropout: ProbabilityDropout | None = None
) -> Tensor:
    """dropout(softmax(q kᵀ / sqrt(d))) v as [s, b, heads · d], of q [s, b, heads, d], k and v [keys, b, groups, d].

    Query head j uses key head j // (heads / groups). Any strides but in the last dimension. causal: row i sees the keys
    up to i, and s = keys. Dropout is for causal attention of a whole sequence.

    Raises:
        RuntimeError: the shapes do not fit together, or dropout of attention that is not causal.
        ValueError: dropout of queries that are not the whole sequence.
    """
    out: Tensor = _Attention.apply(q, k, v, causal, _mask(dropout))
    return out


def packed_attention(qkv: Tensor, *, dropout: ProbabilityDropout | None = None) -> Tensor:
    """Causal attention of the packed projection [s, b, g, r + 2, d] (r query heads of a group, its key, its value) as
    [s, b, g · r · d]; the gradient is packed as well, so that none of q, k, v has to be put together."""
    out: Tensor = _PackedAttention.apply(qkv, _mask(dropout))
    return out


def _mask(dropout: ProbabilityDropout | None) -> Mask:
    if dropout is None or not (threshold := drop_threshold(dropout.p)):
        return None, 0, 0, 0
    if dropout.first_query != 0:
        raise ValueError(
            f"own attention drops probabilities of a whole sequence, and the first query's position is "
            f"{dropout.first_query}; set backend.attention = \"math\""
        )
    return dropout.keys, dropout.op_key, threshold, dropout.head_offset


class _Attention(FirstOrderFunction):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Mask) -> Tensor:
        groups, size = k.shape[2:]
        q = q.unflatten(2, (groups, -1))
        keys, *ctx.mask = mask
        ctx.scale, ctx.causal = size**-0.5, causal
        out, rows = torch.ops.megatron_port.attention_forward.default(q, k, v, ctx.scale, causal, keys, *ctx.mask)
        ctx.save_for_backward(q, k, v, out, rows, keys)
        flat: Tensor = out.flatten(2)
        return flat

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, rows, keys = ctx.saved_tensors
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        torch.ops.megatron_port.attention_backward_.default(
            dout.contiguous(), q, k, v, out, rows, dq, dk, dv, ctx.scale, ctx.causal, keys, *ctx.mask
        )
        return dq.flatten(2, 3), dk, dv, None, None


class _PackedAttention(FirstOrderFunction):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, mask: Mask) -> Tensor:
        q, k, v = _split(qkv)
        keys, *ctx.mask = mask
        ctx.scale = qkv.shape[4] ** -0.5
        out, rows = torch.ops.megatron_port.attention_forward.default(q, k, v, ctx.scale, True, keys, *ctx.mask)
        ctx.save_for_backward(qkv, out, rows, keys)
        flat: Tensor = out.flatten(2)
        return flat

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        qkv, out, rows, keys = ctx.saved_tensors
        gradient: Tensor = qkv.new_empty(qkv.shape)
        torch.ops.megatron_port.attention_backward_.default(
            dout.contiguous(), *_split(qkv), out, rows, *_split(gradient), ctx.scale, True, keys, *ctx.mask
        )
        return gradient, None


def _split(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views [s, b, g, r, d] and [s, b, g, d] of [s, b, g, r + 2, d]."""
    heads = qkv.shape[3] - 2
    return qkv.narrow(3, 0, heads), qkv.select(3, heads), qkv.select(3, heads + 1)


def _forward_shapes(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, keys: Tensor | None = None, *mask: int
) -> tuple[Tensor, Tensor]:
    s, b, g, r, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((b, g, r, 2, s), dtype=torch.float32)


def _nothing(*_: object) -> None:
    return None


def register() -> None:
    """Shapes of the ops, in torch's registry; the gradient is the functions' above."""
    torch.library.register_fake("megatron_port::attention_forward", _forward_shapes)
    torch.library.register_fake("megatron_port::attention_backward_", _nothing)
