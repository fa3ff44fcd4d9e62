"""Bias, dropout and residual add of a layer's branch, and the norm that follows, in one pass each way.

Statistics and arithmetic in fp32; fp32, fp16 and bf16 tensors. Bytes: forward reads x and residual and writes the sum
and its norm once, where the two ops apart write the sum and read it again (5 tensors). Backward reads dy, dsum and the
sum and writes the sum's gradient, and with dropout that of x, once (4 or 5), where three ops apart (norm, the addition
of dsum, bias and dropout) move 7 to 8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_port.core.layers.differentiable import differentiable
from megatron_port.core.layers.dropout import drop_threshold


def bias_dropout_add_norm(
    x: Tensor, x_bias: Tensor | None, residual: Tensor, keys: Tensor, weight: Tensor, bias: Tensor | None, *,
    op_key: int, p: float, seq_offset: int, eps: float, rms: bool,
) -> tuple[Tensor, Tensor]:
    """(norm(sum) · weight + bias, sum) with sum = residual + mask · scale · (x + x_bias), contiguous [s, b, h].

    ``rms``: RMSNorm, else LayerNorm; ``keys``, ``op_key``, ``p``, ``seq_offset``: as ``ops.dropout.bias_dropout_add``
    takes them. The values are those of that op and of ``ops.norm`` one after the other, to the bit. The sum's gradient
    is added to that of the norm before it is rounded.
    """
    y, total, _, _ = _residual_norm(
        x, x_bias, residual, keys, op_key, drop_threshold(p), seq_offset, weight, bias, eps, rms
    )
    return y, total


def _forward_shapes(
    x: Tensor, x_bias: Tensor | None, residual: Tensor, keys: Tensor, op_key: int, threshold: int, seq_offset: int,
    weight: Tensor, bias: Tensor | None, eps: float, rms: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = x.shape[0] * x.shape[1]
    mean = x.new_empty(0 if rms else rows, dtype=torch.float32)
    return torch.empty_like(x), torch.empty_like(x), mean, x.new_empty(rows, dtype=torch.float32)


def _backward_shapes(
    dy: Tensor, dsum: Tensor | None, total: Tensor, keys: Tensor, op_key: int, threshold: int, seq_offset: int,
    weight: Tensor, mean: Tensor, rstd: Tensor, rms: bool, has_bias: bool, has_x_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    row = weight.new_empty(weight.shape)
    return (
        torch.empty_like(total), torch.empty_like(total) if threshold else total.new_empty(0), row,
        torch.empty_like(row) if has_bias else row.new_empty(0),
        torch.empty_like(row) if has_x_bias else row.new_empty(0),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, x_bias, _, keys, op_key, threshold, seq_offset, weight, bias, _, rms = inputs
    _, total, mean, rstd = output
    ctx.save_for_backward(total, keys, weight, mean, rstd)
    ctx.mask, ctx.rms = (op_key, threshold, seq_offset), rms
    ctx.has_bias, ctx.has_x_bias = bias is not None, x_bias is not None
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, dsum: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    total, keys, weight, mean, rstd = ctx.saved_tensors
    dtotal, dx, dweight, dbias, dx_bias = torch.ops.megatron_port.residual_norm_backward.default(
        torch.zeros_like(total) if dy is None else dy.contiguous(), None if dsum is None else dsum.contiguous(), total,
        keys, *ctx.mask, weight, mean, rstd, ctx.rms, ctx.has_bias, ctx.has_x_bias,
    )
    return (
        dx if ctx.mask[1] else dtotal, dx_bias if ctx.has_x_bias else None, dtotal, None, None, None, None, dweight,
        dbias if ctx.has_bias else None, None, None,
    )


_residual_norm = differentiable("residual_norm_forward", _save, _backward)


def register_residual_norm() -> None:
    """Shapes and gradients of the ops, in torch's registry."""
    torch.library.register_fake("megatron_port::residual_norm_forward", _forward_shapes)
    torch.library.register_fake("megatron_port::residual_norm_backward", _backward_shapes)
    torch.library.register_autograd("megatron_port::residual_norm_forward", _backward, setup_context=_save)
