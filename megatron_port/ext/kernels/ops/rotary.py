"""Split of the fused query-key-value projection with rotary position embedding (Su et al., arXiv 2104.09864).

Arithmetic in fp32 with fp32 tables; fp32, fp16 and bf16 tensors. Bytes: the projection is read once and q, k, v are
written once, backward the reverse; the tables add 4 d bytes per position, 4 % at 24 heads in all in half precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_port.core.layers.fused import FirstOrderFunction, first_order, gradient_dtype, torch_split_rotary
from megatron_port.ext.kernels.differentiable import differentiable, slots_of, took

_LARGEST_HEAD = 512


def split_rotary(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, *, offset: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Contiguous q [s, b, g·r, d], k and v [s, b, g, d] of contiguous qkv [s, b, g, r + 2, d], d even and ≤ 512.

    A group's rows are its r query heads, its key, its value. Row i of queries and keys is rotated by row offset + i of
    cos and sin, float32 [positions, d/2]: element j pairs with j + d/2 (Llama's convention). No tables: split only.
    RuntimeError where offset + s is beyond the tables. The gradients may have any strides but in the last dimension.
    """
    q, k, v = _rotary(qkv, cos, sin, offset)
    return q, k, v


def split(qkv: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Split without rotation: keys, values, and queries where a group has one head, are views of qkv.

    The three gradients, of any strides, are put into one packed tensor by one kernel, or by torch for heads that it
    does not take (d odd, or above 512). Own attention writes them there itself (``ops.attention.packed_attention``);
    torch's operators for flash attention, cuDNN and varlen allocate their gradients, each dense, and take none to
    write to, though the kernels behind them could.

    ``bias`` [g·(r + 2)·d]: was added to qkv without a gradient of its own; it gets
    the sums of the packed gradient over s and b, from the same kernel.
    """
    q, k, v = _Split.apply(qkv, bias)
    return q, k, v


class _Split(FirstOrderFunction):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        ctx.slots, ctx.bias = slots_of(bias), bias
        return torch_split_rotary(qkv, None, None)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        size, sums = grads[0].shape[-1], ctx.needs_input_grad[1]
        if size % 2 or size > _LARGEST_HEAD:
            packed = _pack_by_torch(*grads)
            dbias = packed.flatten(0, 1).sum(dim=0, dtype=gradient_dtype(ctx.bias)).flatten() if sums else None
            return packed, dbias
        if not sums:
            return _pack(grads, None, None, 0), None
        packed, dbias, slots = torch.ops.megatron_port.split_backward.default(
            *_last_contiguous(grads), ctx.slots is not None
        )
        return packed, None if ctx.slots is not None and took(ctx.slots, slots) else dbias


def _pack_by_torch(dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
    groups = dk.shape[2]
    return torch.cat((dq.unflatten(2, (groups, -1)), dk.unsqueeze(3), dv.unsqueeze(3)), dim=3)


def _last_contiguous(grads: tuple[Tensor, ...]) -> list[Tensor]:
    return [g if g.stride(-1) == 1 else g.contiguous() for g in grads]


def _pack(grads: tuple[Tensor, ...], cos: Tensor | None, sin: Tensor | None, offset: int) -> Tensor:
    """Gradient of the packed projection from those of q, k and v, rotated back."""
    dq, dk, dv = _last_contiguous(grads)
    packed: Tensor = torch.ops.megatron_port.rotary_backward.default(dq, dk, dv, cos, sin, offset)
    return packed


def _forward_shapes(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, offset: int
) -> tuple[Tensor, Tensor, Tensor]:
    s, b, g, rows, d = qkv.shape
    return qkv.new_empty((s, b, g * (rows - 2), d)), qkv.new_empty((s, b, g, d)), qkv.new_empty((s, b, g, d))


def _backward_shapes(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor | None, sin: Tensor | None, offset: int
) -> Tensor:
    s, b, g, d = dk.shape
    return dq.new_empty((s, b, g, dq.shape[2] // g + 2, d))


def _sums_shapes(dq: Tensor, dk: Tensor, dv: Tensor, keep_slots: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    packed = _backward_shapes(dq, dk, dv, None, None, 0)
    return packed, dq.new_empty(packed.shape[2:].numel()), dq.new_empty(0, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, cos, sin, ctx.offset = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
    cos, sin = ctx.saved_tensors
    return _pack(grads, cos, sin, ctx.offset), None, None, None


_rotary = differentiable("rotary_forward", _save, _backward)


def register_rotary() -> None:
    """Shapes and gradients of the ops, in torch's registry."""
    torch.library.register_fake("megatron_port::rotary_forward", _forward_shapes)
    torch.library.register_fake("megatron_port::rotary_backward", _backward_shapes)
    torch.library.register_fake("megatron_port::split_backward", _sums_shapes)
    torch.library.register_autograd("megatron_port::rotary_forward", _backward, setup_context=_save)
