"""Causal softmax of attention scores with dropout, the fallback where no fused attention serves.

Statistics in fp32; fp32, fp16 and bf16 tensors. Only the live part of a row is read, all of it is written. With e
bytes per element and L = Σ (i + 1 + k - q) live elements per matrix: forward moves (L + q k) e, backward (2 L + q k) e;
at q = k that is 1.5 and 2 times the tensor. Dropout adds q k e to the forward pass; its mask is made in both passes
and never stored. Rows up to 16384 columns are read once, wider ones twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_port.core.layers.cross_entropy import CrossEntropyOps
from megatron_port.core.layers.dropout import drop_threshold
from megatron_port.core.layers.fused import ProbabilityDropout
from megatron_port.ext.kernels.differentiable import differentiable


def causal_softmax(scores: Tensor, *, scale: float, dropout: ProbabilityDropout | None = None) -> Tensor:
    """softmax(scale · scores) over the last dimension of contiguous [b, heads, q, k], of scores' dtype.

    Row i sees the columns j ≤ i + k - q and has zeros beyond; k < q is refused. Every row must have a finite score.
    The gradient is scale · y · (dy - Σ dy·y / Σ y): the last divisor is 1 but for the rounding of y to its dtype.
    Dropout gives the bits of ``dropout.drop`` after the softmax; where the queries are not the last q positions, or
    p rounds to 0, it is what runs.
    """
    if dropout is None:
        probs: Tensor = _softmax(scores, scale)
        return probs
    threshold = drop_threshold(dropout.p)
    if threshold == 0 or dropout.first_query != scores.shape[-1] - scores.shape[-2]:
        return dropout.drop(_softmax(scores, scale))
    dropped: Tensor = _softmax_dropout(scores, scale, dropout.keys, dropout.op_key, threshold, dropout.head_offset)[0]
    return dropped


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


def _dropout_forward_shapes(
    scores: Tensor, scale: float, keys: Tensor, op_key: int, threshold: int, head_offset: int
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(scores), torch.empty_like(scores)


def _dropout_backward_shapes(
    ddropped: Tensor, probs: Tensor, keys: Tensor, scale: float, op_key: int, threshold: int, head_offset: int
) -> Tensor:
    return torch.empty_like(probs)


def _dropout_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, scale, keys, *mask = inputs
    ctx.save_for_backward(output[1], keys)
    ctx.constants = (scale, *mask)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _dropout_backward(ctx: Any, ddropped: Tensor, _: Tensor | None) -> tuple[Tensor, None, None, None, None, None]:
    probs, keys = ctx.saved_tensors
    grad = torch.ops.megatron_port.causal_softmax_dropout_backward.default(
        ddropped.contiguous(), probs, keys, *ctx.constants
    )
    return grad, None, None, None, None, None


_softmax = differentiable("causal_softmax_forward", _save, _backward)
_softmax_dropout = differentiable("causal_softmax_dropout_forward", _dropout_save, _dropout_backward)


def register_softmax() -> None:
    """Shapes and gradients of the ops, in torch's registry."""
    library = torch.library
    library.register_fake("megatron_port::causal_softmax_forward", _forward_shapes)
    library.register_fake("megatron_port::causal_softmax_backward", _backward_shapes)
    library.register_autograd("megatron_port::causal_softmax_forward", _backward, setup_context=_save)
    library.register_fake("megatron_port::causal_softmax_dropout_forward", _dropout_forward_shapes)
    library.register_fake("megatron_port::causal_softmax_dropout_backward", _dropout_backward_shapes)
    library.register_autograd(
        "megatron_port::causal_softmax_dropout_forward", _dropout_backward, setup_context=_dropout_save
    )


# Cross-entropy over a split vocabulary: what a rank knows of its columns, and the gradient in the logits' place.
#
# No gradients of their own: ``layers.cross_entropy`` puts them together over the ranks. fp32, fp16 and bf16 logits,
# arithmetic in fp32. Bytes: the logits once in forward, once in and once out backward; 28 bytes a row beside them.

def statistics(logits: Tensor, labels: Tensor, *, offset: int, extent: int) -> tuple[Tensor, Tensor, Tensor]:
    """(maximum, total, target), each float32 [...], of contiguous logits [..., v] and labels int64 [...].

    Over the columns [0, extent), the ids from ``offset`` on: the maximum m, Σ exp(x - m), and the logit of the label,
    0 where it is none of these ids. With no live column above -inf, m is -inf and the total 0; NaN or +inf in a row
    make its total NaN.
    """
    out: tuple[Tensor, Tensor, Tensor] = torch.ops.megatron_port.cross_entropy_statistics(
        logits, labels, offset, extent
    )
    return out


def gradient_(
    logits: Tensor, labels: Tensor, maximum: Tensor, total: Tensor, grad: Tensor, *, offset: int, extent: int
) -> None:
    """Write (exp(x - maximum) / total - onehot(label)) * grad over the logits, zeros over columns [extent, v).

    ``maximum`` and ``total`` are those of the whole vocabulary, ``grad`` the losses' gradient: float32 [...].
    """
    torch.ops.megatron_port.cross_entropy_gradient_(logits, labels, maximum, total, grad, offset, extent)


class OwnCrossEntropy:
    """Cross-entropy through ``backend.ops``; ``kernels.load`` must have run."""

    def statistics(
        self, logits: Tensor, labels: Tensor, *, offset: int, extent: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        return statistics(logits, labels, offset=offset, extent=extent)

    def gradient_(
        self, logits: Tensor, labels: Tensor, maximum: Tensor, total: Tensor, grad: Tensor, *, offset: int, extent: int
    ) -> None:
        gradient_(logits, labels, maximum, total, grad, offset=offset, extent=extent)


own_cross_entropy: CrossEntropyOps = OwnCrossEntropy()


def _statistics_shapes(logits: Tensor, labels: Tensor, offset: int, extent: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        labels.new_empty(labels.shape, dtype=torch.float32), labels.new_empty(labels.shape, dtype=torch.float32),
        labels.new_empty(labels.shape, dtype=torch.float32),
    )


def _gradient_shapes(
    logits: Tensor, labels: Tensor, maximum: Tensor, total: Tensor, grad: Tensor, offset: int, extent: int
) -> None:
    return None


def register_cross_entropy() -> None:
    """Shapes of the ops, in torch's registry."""
    torch.library.register_fake("megatron_port::cross_entropy_statistics", _statistics_shapes)
    torch.library.register_fake("megatron_port::cross_entropy_gradient_", _gradient_shapes)
