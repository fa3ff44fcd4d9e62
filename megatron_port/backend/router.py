"""The router of a mixture of experts in torch ops: scores, the choice of k experts, their weights, and the gradient.

Of equals the first is chosen, so that a choice is one of the logits alone, whatever the device. Logits are float32, or
float64 for proofs; nothing flows through the choice.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Score = Literal["softmax", "sigmoid"]
GroupScore = Literal["max", "top2"]
_TINY = 1e-20
"""Added to the sum of weights, which may be 0 where all scores of the chosen underflow."""


def route(
    logits: Tensor, bias: Tensor | None, *, k: int, score: Score, groups: int, top_groups: int,
    group_score: GroupScore, normalise: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (experts int64 [tokens, k] ascending, weights [tokens, k], scores [tokens, E]) of logits [tokens, E].

    The k largest score + bias are chosen, from the ``top_groups`` best of ``groups`` equal runs of experts, whose value
    is their largest or the sum of their two largest. NaN counts as infinity and -inf as the lowest number. The weights
    are the scores without bias, divided by their sum (``normalise``), times ``scale``.
    """
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    value = _comparable(scores if bias is None else scores + bias)
    if groups > 1:
        runs = value.unflatten(-1, (groups, -1))
        of_group = runs.amax(-1) if group_score == "max" else runs.topk(2).values.sum(-1)
        best = torch.zeros_like(of_group, dtype=torch.bool)
        best.scatter_(-1, _largest(_comparable(of_group), top_groups), True)
        value = runs.masked_fill(~best.unsqueeze(-1), float("-inf")).flatten(-2)
    experts = _largest(value, k).sort(-1).values
    weights = scores.gather(-1, experts)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    return experts, weights * scale, scores


def route_backward(
    scores: Tensor, experts: Tensor, dweights: Tensor | None, dscores: Tensor | None, *, score: Score,
    normalise: bool, scale: float,
) -> Tensor:
    """Return the logits' gradient [tokens, E] from those of the weights and of the scores; None: there is none."""
    grad = torch.zeros_like(scores) if dscores is None else dscores
    if dweights is not None:
        if normalise:
            chosen = scores.gather(-1, experts)
            total = chosen.sum(-1, keepdim=True) + _TINY
            dweights = (dweights - (dweights * (chosen / total)).sum(-1, keepdim=True)) / total
        grad = grad + torch.zeros_like(scores).scatter(-1, experts, dweights * scale)
    if score == "sigmoid":
        return grad * scores * (1 - scores)
    return scores * (grad - (grad * scores).sum(-1, keepdim=True))


def _comparable(value: Tensor) -> Tensor:
    return value.nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=torch.finfo(value.dtype).min)


def _largest(value: Tensor, count: int) -> Tensor:
    """Indices of the largest, the first of equals, which ``topk`` does not promise."""
    return value.sort(dim=-1, descending=True, stable=True).indices[..., :count]
