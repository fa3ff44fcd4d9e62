"""AdamW (Loshchilov & Hutter, arXiv 1711.05101), the squared norm and the accumulation of many tensors in one call,
with no host sync.

Bytes an element: ``adamw_`` reads the fp32 master and moments and the gradient and writes the master, the moments and
the weight, each once: 28 (fp32 gradients, no separate weights; or half weights and gradients), 30 (fp32 gradients,
half weights). ``square_norm`` reads each element once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def square_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of the squares of all elements: a float64 scalar on the tensors' device, the same bits every time.

    Infinity and NaN go through to the result. Squares are added in fp32 over at most 32 elements and then in fp64:
    within 2e-6 of the exact sum, and an element beyond 1.8e19 counts as infinite. Sum several calls for several dtypes.

    Args:
        tensors: contiguous, of one device and one dtype (fp32, fp16 or bf16); not an empty list, tensors may be empty.
    """
    if not tensors:
        raise ValueError("square_norm of an empty list: there is no device to give a zero on")
    total: Tensor = torch.ops.megatron_port.square_norm(list(tensors))
    return total


@torch.no_grad()
def adamw_(
    weights: Sequence[Tensor],
    masters: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avg: Sequence[Tensor],
    exp_avg_sq: Sequence[Tensor],
    *,
    step: Tensor,
    grad_scale: Tensor | None,
    skip: Tensor | None,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """One update in place, as ``torch.optim.AdamW`` makes it, with g = grad * grad_scale::

        master *= 1 - lr * weight_decay
        exp_avg += (1 - beta1) * (g - exp_avg);  exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g²
        master -= lr / (1 - beta1^step) * exp_avg / (sqrt(exp_avg_sq) / sqrt(1 - beta2^step) + eps)
        weight = master, rounded

    Args:
        weights: one dtype, fp32, fp16 or bf16; an empty list when the masters are the weights.
        masters, exp_avg, exp_avg_sq: fp32. All lists have tensors of the same sizes and are contiguous.
        grads: one dtype, fp32, fp16 or bf16; made contiguous where they are not.
        step: number of this update, from 1; float32 or int64 scalar on the device.
        grad_scale: float32 scalar on the device (unscaling times clipping); None: 1.
        skip: float32 scalar on the device; where it is not zero, or NaN, nothing is written. None: 0.
        lr: float64 scalar on the device, or a number, which one more launch takes there.

    Raises:
        RuntimeError: lists that do not fit together, a wrong dtype or device, betas outside [0, 1).
    """
    if not isinstance(lr, Tensor):
        lr = torch.full((), lr, dtype=torch.float64, device=masters[0].device if masters else None)
    torch.ops.megatron_port.adamw_(
        list(weights), list(masters), [g.contiguous() for g in grads], list(exp_avg), list(exp_avg_sq), step,
        grad_scale, skip, lr, beta1, beta2, eps, weight_decay,
    )
    # Autograd then refuses a graph that still holds the old values.
    torch.autograd.graph.increment_version([*weights, *masters, *exp_avg, *exp_avg_sq])


@torch.no_grad()
def add_gradients_(sums: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Add each gradient to its sum, in one launch for up to 64 of them.

    Args:
        sums: float32, contiguous, on one device.
        grads: of the same sizes and one dtype, fp32, fp16 or bf16; made contiguous where they are not.
    """
    torch.ops.megatron_port.add_gradients_(list(sums), [g.contiguous() for g in grads])


def _norm_shape(tensors: list[Tensor]) -> Tensor:
    return tensors[0].new_empty((), dtype=torch.float64)


def _nothing(*_: object) -> None:
    return None


def register_optimizer() -> None:
    """Shapes of the ops, in torch's registry; none has a gradient."""
    torch.library.register_fake("megatron_port::square_norm", _norm_shape)
    torch.library.register_fake("megatron_port::adamw_", _nothing)
    torch.library.register_fake("megatron_port::add_gradients_", _nothing)
