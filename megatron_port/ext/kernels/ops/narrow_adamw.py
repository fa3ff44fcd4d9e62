"""AdamW with moments in bf16 or in 8 bits, and Lion (Chen et al., arXiv 2302.06675), of many tensors in one call, with
no host sync.

Bytes an element with fp32 gradients and half weights, each read or written once: ``adamw_bf16_`` 22, ``adamw_8bit_``
18.1 and ``lion_`` 22, where ``adamw_`` has 30.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_port.core.config.kernels_settings import STATE_BLOCK

BLOCK = STATE_BLOCK
"""Elements of 8-bit state that share a scale."""


class LogicalRange(NamedTuple):
    """Which elements of the unsplit tensor a range has: element j is element e = start + j of this rank's part, and
    e // run * stride + e % run + first of the unsplit tensor. ``key``: of the tensor's random numbers, int64."""

    start: int
    run: int
    stride: int
    first: int
    key: int


def _rate(lr: float | Tensor, masters: Sequence[Tensor]) -> Tensor:
    if isinstance(lr, Tensor):
        return lr
    return torch.full((), lr, dtype=torch.float64, device=masters[0].device if masters else None)


@torch.no_grad()
def adamw_bf16_(
    weights: Sequence[Tensor], masters: Sequence[Tensor], grads: Sequence[Tensor], exp_avg: Sequence[Tensor],
    exp_avg_sq: Sequence[Tensor], places: Sequence[LogicalRange], *, step: Tensor, grad_scale: Tensor | None,
    skip: Tensor | None, lr: float | Tensor, beta1: float, beta2: float, eps: float, weight_decay: float,
) -> None:
    """Make one update of AdamW in place, as ``ops.optimizer.adamw_`` does, with bf16 moments.

    The moments are computed in fp32, used, and then rounded stochastically: up with the probability of the distance to
    the lower neighbour, by ``dist.counter.random_bits`` of the element's number in the unsplit tensor, its place's
    key, and the step. The lowest 16 bits are exp_avg's, the next 16 exp_avg_sq's.

    Args:
        exp_avg, exp_avg_sq: bf16. All else as ``adamw_`` has it.
        places: one for each tensor.

    Raises:
        RuntimeError: lists that do not fit together, a wrong dtype or device, betas outside [0, 1).
    """
    torch.ops.megatron_port.adamw_bf16_(
        list(weights), list(masters), [g.contiguous() for g in grads], list(exp_avg), list(exp_avg_sq),
        [number for place in places for number in place], step, grad_scale, skip, _rate(lr, masters), beta1, beta2, eps,
        weight_decay,
    )
    torch.autograd.graph.increment_version([*weights, *masters, *exp_avg, *exp_avg_sq])


@torch.no_grad()
def adamw_8bit_(
    weights: Sequence[Tensor], masters: Sequence[Tensor], grads: Sequence[Tensor], exp_avg: Sequence[Tensor],
    exp_avg_scale: Sequence[Tensor], exp_avg_sq: Sequence[Tensor], exp_avg_sq_scale: Sequence[Tensor], *,
    signed_values: Tensor, unsigned_values: Tensor, step: Tensor, grad_scale: Tensor | None, skip: Tensor | None,
    lr: float | Tensor, beta1: float, beta2: float, eps: float, weight_decay: float,
) -> None:
    """Make one update of AdamW in place, as ``ops.optimizer.adamw_`` does, with moments as codes of a byte.

    A moment is ``values[code] * scale``, with a scale for each ``BLOCK`` elements. The new moments are computed in fp32
    and used; then a block's scale is its largest absolute value, at least 1e-12, and each element takes the code of the
    value that is nearest to it over the scale (the upper one at the middle).

    Args:
        masters, grads: of whole blocks, and aligned to 4 elements.
        exp_avg, exp_avg_sq: uint8, the codes; exp_avg_scale, exp_avg_sq_scale: fp32 [n / BLOCK]. All else as ``adamw_``
            has it.
        signed_values, unsigned_values: fp32 [256], ascending, on the device: those of exp_avg and of exp_avg_sq.

    Raises:
        RuntimeError: lists that do not fit together, a wrong dtype or device, a tensor that is not whole blocks.
    """
    torch.ops.megatron_port.adamw_8bit_(
        list(weights), list(masters), [g.contiguous() for g in grads], list(exp_avg), list(exp_avg_scale),
        list(exp_avg_sq), list(exp_avg_sq_scale), signed_values, unsigned_values, step, grad_scale, skip,
        _rate(lr, masters), beta1, beta2, eps, weight_decay,
    )
    torch.autograd.graph.increment_version([
        *weights, *masters, *exp_avg, *exp_avg_scale, *exp_avg_sq, *exp_avg_sq_scale
    ])


@torch.no_grad()
def lion_(
    weights: Sequence[Tensor], masters: Sequence[Tensor], grads: Sequence[Tensor], exp_avg: Sequence[Tensor], *,
    grad_scale: Tensor | None, skip: Tensor | None, lr: float | Tensor, beta1: float, beta2: float,
    weight_decay: float,
) -> None:
    """Make one update in place, with g = grad * grad_scale::

        master = (1 - lr * weight_decay) * master - lr * sign(beta1 * exp_avg + (1 - beta1) * g)
        exp_avg = beta2 * exp_avg + (1 - beta2) * g
        weight = master, rounded

    Args:
        masters, exp_avg: fp32. All else as ``ops.optimizer.adamw_`` has it.

    Raises:
        RuntimeError: lists that do not fit together, a wrong dtype or device, betas outside [0, 1).
    """
    torch.ops.megatron_port.lion_(
        list(weights), list(masters), [g.contiguous() for g in grads], list(exp_avg), grad_scale, skip,
        _rate(lr, masters), beta1, beta2, weight_decay,
    )
    torch.autograd.graph.increment_version([*weights, *masters, *exp_avg])


def _nothing(*_: object) -> None:
    return None


def register_narrow_adamw() -> None:
    """Shapes of the ops, in torch's registry; none has a gradient."""
    for name in ("adamw_bf16_", "adamw_8bit_", "lion_"):
        torch.library.register_fake(f"megatron_port::{name}", _nothing)
