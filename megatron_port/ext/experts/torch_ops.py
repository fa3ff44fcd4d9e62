"""Router and rows of layers of experts in torch ops, with their gradients."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

# The router of a mixture of experts in torch ops: scores, the choice of k experts, their weights, and the gradient.
#
# Of equals the first is chosen, so that a choice is one of the logits alone, whatever the device. Logits are float32,
# or float64 for proofs; nothing flows through the choice.
Score = Literal["softmax", "sigmoid"]
GroupScore = Literal["max", "top2"]
_TINY = 1e-20
"""Added to the sum of weights, which may be 0 where all scores of the chosen underflow."""


class Routing(NamedTuple):
    """How a router chooses and weighs."""

    k: int
    """Experts of a token."""
    score: Score = "softmax"
    normalise: bool = True
    """Divide the weights of a token by their sum."""
    scale: float = 1.0
    """Factor on the weights."""
    groups: int = 1
    """Equal runs of neighbouring experts, of which a token's experts are in the ``top_groups`` best."""
    top_groups: int = 1
    group_score: GroupScore = "top2"
    """Value of a group: its largest score + bias, or the sum of its two largest."""


class Routed(NamedTuple):
    """Result of a router for logits [tokens, E]."""

    experts: Tensor
    """int64 [tokens, k]; ascending where the router chose them."""
    weights: Tensor
    """[tokens, k]: the scores of the experts without bias, divided by their sum (``normalise``), times ``scale``."""
    scores: Tensor
    """[tokens, E]"""
    margin: Tensor
    """[tokens]: the last score + bias that was chosen less the best one of the allowed groups that was not; 0 where
    none is left, where the difference is not finite, and of ``given`` experts."""


def route(logits: Tensor, bias: Tensor | None, routing: Routing, given: Tensor | None = None) -> Routed:
    """Return where tokens go: to the k largest score + bias of each, or to ``given`` experts int64 [tokens, k].

    NaN counts as infinity and -inf as the lowest number.
    """
    scores = logits.softmax(-1) if routing.score == "softmax" else logits.sigmoid()
    if given is None:
        experts, margin = _chosen(scores if bias is None else scores + bias, routing)
    else:
        experts, margin = given, scores.new_zeros(scores.shape[0])
    weights = scores.gather(-1, experts)
    if routing.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    return Routed(experts, weights * routing.scale, scores, margin)


def _chosen(biased: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    value, k = _comparable(biased), routing.k
    if routing.groups > 1:
        runs = value.unflatten(-1, (routing.groups, -1))
        of_group = runs.amax(-1) if routing.group_score == "max" else runs.topk(2).values.sum(-1)
        best = torch.zeros_like(of_group, dtype=torch.bool)
        best.scatter_(-1, _largest(_comparable(of_group), routing.top_groups)[1], True)
        value = runs.masked_fill(~best.unsqueeze(-1), float("-inf")).flatten(-2)
    values, order = _largest(value, k + 1)
    margin = values[..., k - 1] - values[..., k] if values.shape[-1] > k else values.new_zeros(values.shape[0])
    return order[..., :k].sort(-1).values, margin.where(margin.isfinite(), 0.0)


def route_backward(
    scores: Tensor, experts: Tensor, dweights: Tensor | None, dscores: Tensor | None, routing: Routing
) -> Tensor:
    """Return the logits' gradient [tokens, E] from those of the weights and of the scores; None: there is none."""
    grad = torch.zeros_like(scores) if dscores is None else dscores
    if dweights is not None:
        if routing.normalise:
            chosen = scores.gather(-1, experts)
            total = chosen.sum(-1, keepdim=True) + _TINY
            dweights = (dweights - (dweights * (chosen / total)).sum(-1, keepdim=True)) / total
        grad = grad + torch.zeros_like(scores).scatter(-1, experts, dweights * routing.scale)
    if routing.score == "sigmoid":
        return grad * scores * (1 - scores)
    return scores * (grad - (grad * scores).sum(-1, keepdim=True))


def _comparable(value: Tensor) -> Tensor:
    return value.nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=torch.finfo(value.dtype).min)


def _largest(value: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest from the highest down and their indices, of equals the first, which ``topk`` does not promise."""
    values, indices = value.sort(dim=-1, descending=True, stable=True)
    return values[..., :count], indices[..., :count]


def counted(index: Tensor, number: int) -> Tensor:
    """Return how often each of 0 to ``number`` - 1 occurs in ``index``, both int64: [number], exact.

    torch's ``bincount`` makes the host wait for a GPU twice, for the smallest and the largest index.
    """
    return index.new_zeros(number).scatter_add_(0, index, torch.ones_like(index))


# Rows of tokens at the places of their experts, in torch ops: copied there, summed back, and the sum's gradients.
#
# Rows of any floating-point dtype; sums in float32, float64 for float64. ``place`` [tokens, k] names the rows of each
# token, -1 one that was dropped. Nothing depends on an order that a device chooses: no additions by index.

def gather_rows(x: Tensor, source: Tensor) -> Tensor:
    """Return [rows, h] with row r = x[source[r]], of x [tokens, h] and source int64 [rows]."""
    return x.index_select(0, source)


def sum_rows(y: Tensor, place: Tensor, weight: Tensor | None) -> Tensor:
    """Return [tokens, h], of each token the sum of weight[t, j] · y[place[t, j]] in the order of j, rounded once.

    y [rows, h]; place int64 [tokens, k], -1: left out; weight [tokens, k] in the sums' dtype, None: 1.
    """
    total = y.new_zeros((place.shape[0], y.shape[1]), dtype=_wide(y.dtype))
    if not y.shape[0]:
        return total.to(y.dtype)
    for j, rows in enumerate(place.unbind(1)):
        row = y.index_select(0, rows.clamp_min(0)).to(total.dtype)
        if weight is not None:
            row = row * weight[:, j : j + 1]
        total += row.masked_fill((rows < 0).unsqueeze(1), 0.0)
    return total.to(y.dtype)


def sum_rows_backward(grad: Tensor, y: Tensor, place: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (dy [rows, h], dweight [tokens, k]) of the sum's gradient [tokens, h]; place must name each row once."""
    flat, rows = place.reshape(-1), y.shape[0]
    # The last one is that of the dropped; a row that no place names is an index out of range.
    copy = torch.full((rows + 1,), flat.numel(), device=place.device)
    copy[torch.where(flat < 0, rows, flat)] = torch.arange(flat.numel(), device=place.device)
    copy = copy[:rows]
    wide = grad.index_select(0, copy // place.shape[1]).to(_wide(y.dtype))
    dweight = torch.zeros(flat.shape, dtype=wide.dtype, device=y.device)
    dweight[copy] = (wide * y).sum(dim=1)
    dy = wide * weight.reshape(-1).index_select(0, copy).unsqueeze(1)
    return dy.to(y.dtype), dweight.view(place.shape)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
