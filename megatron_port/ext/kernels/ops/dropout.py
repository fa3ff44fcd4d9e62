"""Bias, dropout and residual add, with the masks of ``core/layers/dropout.py`` made from counters in the kernel.

Arithmetic in fp32; fp32, fp16 and bf16 tensors. Bytes: forward reads x and residual and writes out once; backward
reads dout and writes dx once, at most 1.13 times that with the partial sums of dbias (1.01 at 16k rows). No mask is
stored: both passes compute it. With p = 0 dx is dout itself, and backward only reads it, for dbias.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_port.core.layers.differentiable import differentiable
from megatron_port.core.layers.dropout import drop_threshold


def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, keys: Tensor, *, op_key: int, p: float, seq_offset: int,
    width: int, width_offset: int,
) -> Tensor:
    """residual + mask · scale · (x + bias) of contiguous x, residual [s, b, h] and bias [h].

    ``keys``: int64 [b], may be empty where p is 0; ``op_key``: both from ``layers.dropout.DropoutStream``.
    ``seq_offset``, ``width_offset``: where the slice starts in the whole tensor of row size ``width``.
    p is rounded to 1/65536 (``drop_threshold``). Without residual: mask · scale · (x + bias).
    """
    out: Tensor = _bias_dropout_add(
        x, bias, residual, keys, op_key, drop_threshold(p), seq_offset, width, width_offset
    )
    return out


def _forward_shapes(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, keys: Tensor, op_key: int, threshold: int,
    seq_offset: int, width: int, width_offset: int,
) -> Tensor:
    return torch.empty_like(x)


def _backward_shapes(
    dout: Tensor, keys: Tensor, op_key: int, threshold: int, seq_offset: int, width: int, width_offset: int,
    has_bias: bool,
) -> tuple[Tensor, Tensor]:
    dx = torch.empty_like(dout) if threshold else dout.new_empty(0)
    return dx, dout.new_empty(dout.shape[2] if has_bias else 0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, bias, residual, keys, *mask = inputs
    ctx.save_for_backward(keys)
    ctx.mask = tuple(mask)
    ctx.has_bias, ctx.has_residual = bias is not None, residual is not None


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    (keys,) = ctx.saved_tensors
    dout = dout.contiguous()
    masked = ctx.mask[1] > 0
    dx, dbias = dout, None
    if masked or ctx.has_bias:
        made, dbias = torch.ops.megatron_port.bias_dropout_add_backward.default(dout, keys, *ctx.mask, ctx.has_bias)
        dx = made if masked else dout
    return dx, dbias if ctx.has_bias else None, dout if ctx.has_residual else None, *[None] * 6


_bias_dropout_add = differentiable("bias_dropout_add_forward", _save, _backward)


def register_dropout() -> None:
    """Shapes and gradients of the ops, in torch's registry."""
    torch.library.register_fake("megatron_port::bias_dropout_add_forward", _forward_shapes)
    torch.library.register_fake("megatron_port::bias_dropout_add_backward", _backward_shapes)
    torch.library.register_autograd("megatron_port::bias_dropout_add_forward", _backward, setup_context=_save)
