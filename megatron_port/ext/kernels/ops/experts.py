"""Rows of tokens at the places of their experts: copied there, summed back, and the gradients of the sum.

fp32, fp16 and bf16 rows, arithmetic in fp32. No gradients of their own: the gradient of a copy is a sum and the other
way round (``backend.experts``). Bytes: a copy reads and writes each row once; a sum of k rows reads k and writes one;
its gradients read grad and k rows and write k.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gather_rows(x: Tensor, source: Tensor) -> Tensor:
    """Return [rows, h] with row r = x[source[r]], of contiguous x [tokens, h] and source int64 [rows]."""
    out: Tensor = torch.ops.megatron_port.gather_rows.default(x, source)
    return out


def sum_rows(y: Tensor, place: Tensor, weight: Tensor | None) -> Tensor:
    """Return [tokens, h], of each token the sum of weight[t, j] · y[place[t, j]] in the order of j, rounded once.

    Contiguous y [rows, h]; place int64 [tokens, k], -1: left out; weight float32 [tokens, k], None: 1.
    """
    out: Tensor = torch.ops.megatron_port.sum_rows.default(y, place, weight)
    return out


def sum_rows_backward(grad: Tensor, y: Tensor, place: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (dy [rows, h], dweight float32 [tokens, k]) of the sum's gradient [tokens, h].

    ``place`` must name each row once; on a CPU that is checked.
    """
    out: tuple[Tensor, Tensor] = torch.ops.megatron_port.sum_rows_backward.default(grad, y, place, weight)
    return out


def _gather_shape(x: Tensor, source: Tensor) -> Tensor:
    return x.new_empty((source.shape[0], x.shape[1]))


def _sum_shape(y: Tensor, place: Tensor, weight: Tensor | None) -> Tensor:
    return y.new_empty((place.shape[0], y.shape[1]))


def _backward_shapes(grad: Tensor, y: Tensor, place: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(y), y.new_empty(place.shape, dtype=torch.float32)


def register_expert_rows() -> None:
    """Shapes of the ops, in torch's registry."""
    torch.library.register_fake("megatron_port::gather_rows", _gather_shape)
    torch.library.register_fake("megatron_port::sum_rows", _sum_shape)
    torch.library.register_fake("megatron_port::sum_rows_backward", _backward_shapes)


# The router of a mixture of experts: scores, the choice of k experts, their weights, and the logits' gradient.
#
# float32, at most 512 experts, 32 groups and 32 choices. No gradients of their own: ``backend.experts`` puts them
# together. Bytes: forward the logits in and the scores out, backward the scores (and their gradient) in and the logits'
# gradient out; 12 bytes a choice and 4 a token beside them.

MOST_EXPERTS, MOST_CHOICES = 512, 32
"""``MP_MOST_EXPERTS`` and ``MP_MOST_ROUTED`` of include/route.h: of a layer; of a token, and of groups."""


def route(
    logits: Tensor, bias: Tensor | None, given: Tensor | None, *, k: int, sigmoid: bool, groups: int, top_groups: int,
    two: bool, normalise: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (experts int64 [tokens, k] ascending, weights [tokens, k], scores [tokens, E], margin [tokens]) of
    contiguous logits; the experts are ``given`` int64 [tokens, k] where it is a tensor, and the margin then 0.

    ``bias`` [E] only chooses. ``two``: a group's value is the sum of its two largest, otherwise its largest.
    """
    out: tuple[Tensor, Tensor, Tensor, Tensor] = torch.ops.megatron_port.route.default(
        logits, bias, given, k, sigmoid, groups, top_groups, two, normalise, scale
    )
    return out


def route_backward(
    scores: Tensor, experts: Tensor, dweights: Tensor | None, dscores: Tensor | None, *, sigmoid: bool,
    normalise: bool, scale: float,
) -> Tensor:
    """Return the logits' gradient [tokens, E] from those of the weights and of the scores; None: there is none."""
    out: Tensor = torch.ops.megatron_port.route_backward.default(
        scores, experts, dweights, dscores, sigmoid, normalise, scale
    )
    return out


def _route_shapes(
    logits: Tensor, bias: Tensor | None, given: Tensor | None, k: int, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, chosen = logits.shape[0], (logits.shape[0], k)
    return (logits.new_empty(chosen, dtype=torch.int64), logits.new_empty(chosen), torch.empty_like(logits),
            logits.new_empty(tokens))


def _backward_shape(scores: Tensor, chosen: Tensor, *_: object) -> Tensor:
    return torch.empty_like(scores)


def register_route() -> None:
    """Shapes of the ops, in torch's registry."""
    torch.library.register_fake("megatron_port::route", _route_shapes)
    torch.library.register_fake("megatron_port::route_backward", _backward_shape)
