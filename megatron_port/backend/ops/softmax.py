"""Causal softmax of attention scores, the fallback where no fused attention serves.

Statistics in fp32; fp32, fp16 and bf16 tensors. Only the live part of a row is read, all of it is written. With e
bytes an element and L = Σ (i + 1 + k - q) live elements per matrix: forward moves (L + q k) e, backward (2 L + q k) e;
at q = k that is 1.5 and 2 times the tensor. Rows up to 16384 columns are read once, wider ones twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_port.backend.direct import differentiable


def causal_softmax(scores: Tensor, *, scale: float) -> Tensor:
    """softmax(scale · scores) over the last dimension of contiguous [b, heads, q, k], of scores' dtype.

    Row i sees the columns j ≤ i + k - q and has zeros beyond; k < q is refused. Every row must have a finite score.
    The gradient is scale · y · (dy - Σ dy·y / Σ y): the last divisor is 1 but for the rounding of y to its dtype.
    """
    probs: Tensor = _softmax(scores, scale)
    return probs


def _forward_shapes(scores: Tensor, scale: float) -> Tensor:
    return torch.empty_like(scores)


def _backward_shapes(dprobs: Tensor, probs: Tensor, scale: float) -> Tensor:
    return torch.empty_like(probs)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.scale = inputs[1]


def _backward(ctx: Any, dprobs: Tensor) -> tuple[Tensor, None]:
    (probs,) = ctx.saved_tensors
    return torch.ops.megatron_port.causal_softmax_backward.default(dprobs.contiguous(), probs, ctx.scale), None


_softmax = differentiable("causal_softmax_forward", _save, _backward)


def register() -> None:
    """Shapes and gradients of the ops, in torch's registry."""
    torch.library.register_fake("megatron_port::causal_softmax_forward", _forward_shapes)
    torch.library.register_fake("megatron_port::causal_softmax_backward", _backward_shapes)
    torch.library.register_autograd("megatron_port::causal_softmax_forward", _backward, setup_context=_save)
