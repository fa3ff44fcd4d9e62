"""The router of a mixture of experts: scores, the choice of k experts, their weights, and the logits' gradient.

float32, at most 512 experts, 32 groups and 32 choices. No gradients of their own: ``backend.experts`` puts them
together. Bytes: forward the logits in and the scores out, backward the scores (and their gradient) in and the logits'
gradient out; 12 bytes a choice and 4 a token beside them.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
