"""AdamW (Loshchilov & Hutter, arXiv 1711.05101), the squared norm and the accumulation of many tensors in one call,
with no host sync.

Bytes an element: ``adamw_`` reads the fp32 master and moments and the gradient and writes the master, the moments and
the weight, each once: 28 (fp32 gradients, no separate weights; or half weights and gradients), 30 (fp32 gradients,
half weights). ``square_norm`` reads each element once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_port.ext.kernels.settings import STATE_BLOCK


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


@torch.no_grad()
def add_slots_(
    sums: Sequence[Tensor], slots: Sequence[Tensor], rows: Sequence[int], like: Tensor | None = None
) -> None:
    """Add gradients that were left as partial sums, in one launch for up to 64 of them.

    Args:
        sums: float32 [cols], contiguous, on one device.
        slots: float32 [slots, gradients, cols], as a backward op returned it; ``rows``: which of its gradients.
        like: a tensor to whose dtype each gradient is rounded before it is added, to the bit what
            :func:`add_gradients_` does with gradients of that dtype; None: it is not rounded.
    """
    torch.ops.megatron_port.add_slots_(list(sums), list(slots), list(rows), sums[0] if like is None else like)


def _norm_shape(tensors: list[Tensor]) -> Tensor:
    return tensors[0].new_empty((), dtype=torch.float64)


def _nothing(*_: object) -> None:
    return None


def register_optimizer() -> None:
    """Shapes of the ops, in torch's registry; none has a gradient."""
    torch.library.register_fake("megatron_port::square_norm", _norm_shape)
    torch.library.register_fake("megatron_port::adamw_", _nothing)
    torch.library.register_fake("megatron_port::add_gradients_", _nothing)
    torch.library.register_fake("megatron_port::add_slots_", _nothing)


# AdamW with moments in bf16 or in 8 bits, and Lion (Chen et al., arXiv 2302.06675), of many tensors in one call, with
# no host sync.
#
# Bytes an element with fp32 gradients and half weights, each read or written once: ``adamw_bf16_`` 22, ``adamw_8bit_``
# 18.1 and ``lion_`` 22, where ``adamw_`` has 30.

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




def register_narrow_adamw() -> None:
    """Shapes of the ops, in torch's registry; none has a gradient."""
    for name in ("adamw_bf16_", "adamw_8bit_", "lion_"):
        torch.library.register_fake(f"megatron_port::{name}", _nothing)


# Gradients of looked-up rows added to a table's sum: no gradient of the whole table is made.
#
# fp32, fp16 and bf16 rows; the sum is fp32. The rows of a token are added up in one order, without atomics: the same
# bits again on every device. Bytes: each gradient once, each row of the table that is named in and out; a sort of the
# tokens.

@torch.no_grad()
def add_rows_(total: Tensor, tokens: Tensor, rows: Tensor) -> None:
    """Add rows [n, h] to the rows of ``total`` [table rows, h], float32, that tokens int64 [n] name."""
    ids, order = torch.sort(tokens, stable=True)
    torch.ops.megatron_port.add_rows_(total, rows.contiguous(), order, ids)


def _no_rows(total: Tensor, rows: Tensor, order: Tensor, ids: Tensor) -> None:
    return None


def register_table_rows() -> None:
    """Shapes of the op, in torch's registry; it has no gradient."""
    torch.library.register_fake("megatron_port::add_rows_", _no_rows)
