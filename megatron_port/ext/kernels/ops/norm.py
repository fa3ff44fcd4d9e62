"""LayerNorm (Ba et al., arXiv 1607.06450) and RMSNorm (Zhang & Sennrich, arXiv 1910.07467) with the residual add.

Statistics in fp32; fp32, fp16 and bf16 tensors. Bytes: forward reads x (and residual) and writes y (and sum) once,
backward reads dy, sum (and dsum) and writes dx once; 1 % more for partial sums of the weights' gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_port.core.layers.dropout import drop_threshold
from megatron_port.core.layers.fused import FirstOrderFunction, first_order
from megatron_port.ext.kernels.differentiable import differentiable, slots_of, took


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension of contiguous x [..., h]."""
    y: Tensor = _norm(x, None, weight, bias, eps, False)[0]
    return y


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension of contiguous x [..., h]."""
    y: Tensor = _norm(x, None, weight, None, eps, True)[0]
    return y


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """(layer_norm(x + residual), x + residual), both [..., h]."""
    y, total, _, _ = _norm(x, residual, weight, bias, eps, False)
    return y, total


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), both [..., h]."""
    y, total, _, _ = _norm(x, residual, weight, None, eps, True)
    return y, total


def fork(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, rms: bool) -> tuple[Tensor, Tensor]:
    """(norm of x, x), for an x that is used beside its norm too: the backward pass of the norm adds the gradient of
    that use, which saves a pass over three tensors of x's size."""
    if torch.compiler.is_compiling():  # a registered op may not return its input
        return (rms_norm(x, weight, eps) if rms else layer_norm(x, weight, bias, eps)), x
    y, same = _Fork.apply(x, weight, bias, eps, rms)
    return y, same


class _Fork(FirstOrderFunction):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, rms: bool
    ) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            y, _, mean, rstd = torch.ops.megatron_port.norm_forward.default(x, None, weight, bias, eps, rms)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.rms, ctx.has_bias, ctx.has_residual = rms, bias is not None, True
        ctx.slots = slots_of(weight, bias)
        ctx.set_materialize_grads(False)
        return y, x

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor | None, dx: Tensor | None) -> tuple[Tensor | None, ...]:
        total, _, dweight, dbias, *_ = _backward(ctx, dy, dx)
        return total, dweight, dbias, None, None


def _forward_shapes(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, rms: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = x.numel() // weight.numel()
    total = torch.empty_like(x) if residual is not None else x.new_empty(0)
    mean = x.new_empty(0 if rms else rows, dtype=torch.float32)
    return torch.empty_like(x), total, mean, x.new_empty(rows, dtype=torch.float32)


def _backward_shapes(
    dy: Tensor, dsum: Tensor | None, total: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, rms: bool,
    has_bias: bool, keep_slots: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dbias = torch.empty_like(weight) if has_bias else weight.new_empty(0)
    return torch.empty_like(total), torch.empty_like(weight), dbias, rstd.new_empty(0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, bias, _, rms = inputs
    _, total, mean, rstd = output
    ctx.save_for_backward(total if residual is not None else x, weight, mean, rstd)
    ctx.rms, ctx.has_bias, ctx.has_residual = rms, bias is not None, residual is not None
    ctx.slots = slots_of(weight, bias)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, dy: Tensor | None, dsum: Tensor | None, *_: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, None, None]:
    total, weight, mean, rstd = ctx.saved_tensors
    skip = dsum.contiguous() if ctx.has_residual and dsum is not None else None
    if dy is None:  # only the sum was used
        return skip, skip, None, None, None, None
    dx, dweight, dbias, slots = torch.ops.megatron_port.norm_backward.default(
        dy.contiguous(), skip, total, weight, mean, rstd, ctx.rms, ctx.has_bias, ctx.slots is not None
    )
    if ctx.slots is not None and took(ctx.slots, slots):
        dweight = dbias = None
    return dx, dx if ctx.has_residual else None, dweight, dbias if ctx.has_bias else None, None, None


_norm = differentiable("norm_forward", _save, _backward)


def register_norm() -> None:
    """Shapes and gradients of the ops, in torch's registry."""
    torch.library.register_fake("megatron_port::norm_forward", _forward_shapes)
    torch.library.register_fake("megatron_port::norm_backward", _backward_shapes)
    torch.library.register_autograd("megatron_port::norm_forward", _backward, setup_context=_save)


# Bias, dropout and residual add of a layer's branch, and the norm that follows, in one pass each way.
#
# Statistics and arithmetic in fp32; fp32, fp16 and bf16 tensors. Bytes: forward reads x and residual and writes the
# sum and its norm once, where the two ops apart write the sum and read it again (5 tensors). Backward reads dy, dsum
# and the sum and writes the sum's gradient, and with dropout that of x, once (4 or 5), where three ops apart (norm,
# the addition of dsum, bias and dropout) move 7 to 8.

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


def _add_norm_shapes(
    x: Tensor, x_bias: Tensor | None, residual: Tensor, keys: Tensor, op_key: int, threshold: int, seq_offset: int,
    weight: Tensor, bias: Tensor | None, eps: float, rms: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = x.shape[0] * x.shape[1]
    mean = x.new_empty(0 if rms else rows, dtype=torch.float32)
    return torch.empty_like(x), torch.empty_like(x), mean, x.new_empty(rows, dtype=torch.float32)


def _add_norm_backward_shapes(
    dy: Tensor, dsum: Tensor | None, total: Tensor, keys: Tensor, op_key: int, threshold: int, seq_offset: int,
    weight: Tensor, mean: Tensor, rstd: Tensor, rms: bool, has_bias: bool, has_x_bias: bool, keep_slots: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    row = weight.new_empty(weight.shape)
    return (
        torch.empty_like(total), torch.empty_like(total) if threshold else total.new_empty(0), row,
        torch.empty_like(row) if has_bias else row.new_empty(0),
        torch.empty_like(row) if has_x_bias else row.new_empty(0), rstd.new_empty(0),
    )


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, x_bias, _, keys, op_key, threshold, seq_offset, weight, bias, _, rms = inputs
    _, total, mean, rstd = output
    ctx.save_for_backward(total, keys, weight, mean, rstd)
    ctx.mask, ctx.rms = (op_key, threshold, seq_offset), rms
    ctx.has_bias, ctx.has_x_bias = bias is not None, x_bias is not None
    ctx.slots = slots_of(weight, bias, x_bias)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _add_norm_backward(ctx: Any, dy: Tensor | None, dsum: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    total, keys, weight, mean, rstd = ctx.saved_tensors
    dtotal, dx, dweight, dbias, dx_bias, slots = torch.ops.megatron_port.residual_norm_backward.default(
        torch.zeros_like(total) if dy is None else dy.contiguous(), None if dsum is None else dsum.contiguous(), total,
        keys, *ctx.mask, weight, mean, rstd, ctx.rms, ctx.has_bias, ctx.has_x_bias, ctx.slots is not None,
    )
    if ctx.slots is not None and took(ctx.slots, slots):
        dweight = dbias = dx_bias = None
    return (
        dx if ctx.mask[1] else dtotal, dx_bias if ctx.has_x_bias else None, dtotal, None, None, None, None, dweight,
        dbias if ctx.has_bias else None, None, None,
    )


_residual_norm = differentiable("residual_norm_forward", _save_sum, _add_norm_backward)


def register_residual_norm() -> None:
    """Shapes and gradients of the ops, in torch's registry."""
    torch.library.register_fake("megatron_port::residual_norm_forward", _add_norm_shapes)
    torch.library.register_fake("megatron_port::residual_norm_backward", _add_norm_backward_shapes)
    torch.library.register_autograd("megatron_port::residual_norm_forward", _add_norm_backward, setup_context=_save_sum)


# Bias, dropout and residual add, with the masks of ``core/layers/dropout.py`` made from counters in the kernel.
#
# Arithmetic in fp32; fp32, fp16 and bf16 tensors. Bytes: forward reads x and residual and writes out once; backward
# reads dout and writes dx once, at most 1.13 times that with the partial sums of dbias (1.01 at 16k rows). No mask is
# stored: both passes compute it. With p = 0 dx is dout itself, and backward only reads it, for dbias.

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


def _dropout_shapes(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, keys: Tensor, op_key: int, threshold: int,
    seq_offset: int, width: int, width_offset: int,
) -> Tensor:
    return torch.empty_like(x)


def _dropout_backward_shapes(
    dout: Tensor, keys: Tensor, op_key: int, threshold: int, seq_offset: int, width: int, width_offset: int,
    has_bias: bool, keep_slots: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty_like(dout) if threshold else dout.new_empty(0)
    return dx, dout.new_empty(dout.shape[2] if has_bias else 0), dout.new_empty(0, dtype=torch.float32)


def _save_drop(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, bias, residual, keys, *mask = inputs
    ctx.save_for_backward(keys)
    ctx.mask = tuple(mask)
    ctx.has_bias, ctx.has_residual = bias is not None, residual is not None
    ctx.slots = slots_of(bias)


def _drop_backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    (keys,) = ctx.saved_tensors
    dout = dout.contiguous()
    masked = ctx.mask[1] > 0
    dx, dbias = dout, None
    if masked or ctx.has_bias:
        made, dbias, slots = torch.ops.megatron_port.bias_dropout_add_backward.default(
            dout, keys, *ctx.mask, ctx.has_bias, ctx.slots is not None
        )
        if ctx.slots is not None and took(ctx.slots, slots):
            dbias = None
        dx = made if masked else dout
    return dx, dbias if ctx.has_bias else None, dout if ctx.has_residual else None, *[None] * 6


_bias_dropout_add = differentiable("bias_dropout_add_forward", _save_drop, _drop_backward)


def register_dropout() -> None:
    """Shapes and gradients of the ops, in torch's registry."""
    torch.library.register_fake("megatron_port::bias_dropout_add_forward", _dropout_shapes)
    torch.library.register_fake("megatron_port::bias_dropout_add_backward", _dropout_backward_shapes)
    torch.library.register_autograd("megatron_port::bias_dropout_add_forward", _drop_backward, setup_context=_save_drop)
