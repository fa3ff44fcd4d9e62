"""LayerNorm (Ba et al., arXiv 1607.06450) and RMSNorm (Zhang & Sennrich, arXiv 1910.07467) with the residual add.

Statistics in fp32; fp32, fp16 and bf16 tensors. Bytes: forward reads x (and residual) and writes y (and sum) once,
backward reads dy, sum (and dsum) and writes dx once; 1 % more for partial sums of the weights' gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_port.core.layers.differentiable import differentiable
from megatron_port.core.layers.fused import FirstOrderFunction, first_order


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
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dbias = torch.empty_like(weight) if has_bias else weight.new_empty(0)
    return torch.empty_like(total), torch.empty_like(weight), dbias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, bias, _, rms = inputs
    _, total, mean, rstd = output
    ctx.save_for_backward(total if residual is not None else x, weight, mean, rstd)
    ctx.rms, ctx.has_bias, ctx.has_residual = rms, bias is not None, residual is not None
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, dy: Tensor | None, dsum: Tensor | None, *_: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, None, None]:
    total, weight, mean, rstd = ctx.saved_tensors
    skip = dsum.contiguous() if ctx.has_residual and dsum is not None else None
    if dy is None:  # only the sum was used
        return skip, skip, None, None, None, None
    dx, dweight, dbias = torch.ops.megatron_port.norm_backward.default(
        dy.contiguous(), skip, total, weight, mean, rstd, ctx.rms, ctx.has_bias
    )
    return dx, dx if ctx.has_residual else None, dweight, dbias if ctx.has_bias else None, None, None


_norm = differentiable("norm_forward", _save, _backward)


def register_norm() -> None:
    """Shapes and gradients of the ops, in torch's registry."""
    torch.library.register_fake("megatron_port::norm_forward", _forward_shapes)
    torch.library.register_fake("megatron_port::norm_backward", _backward_shapes)
    torch.library.register_autograd("megatron_port::norm_forward", _backward, setup_context=_save)
