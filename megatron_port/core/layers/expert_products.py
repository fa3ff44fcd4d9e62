"""Providers of a layer of experts: the router and the moving of rows, in torch ops or own kernels.

None of them has a gradient; the layer's autograd functions put them together (``layers.experts``).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from megatron_port.core.layers import expert_choice as router
from megatron_port.core.layers.expert_choice import Routed, Routing
from megatron_port.ext.kernels import expert_rows
from megatron_port.ext.kernels.ops import expert_rows as own_rows
from megatron_port.ext.kernels.ops import route as own_router


class ExpertOps(Protocol):
    """Rows x, y [.., h] of any dtype; indices int64; logits, scores and weights float32, float64 with float64 rows.

    ``kernels.expert_rows`` and ``layers.expert_choice`` say what is computed. Rows have the same bits from every
    provider.
    """

    def gather_rows(self, x: Tensor, source: Tensor) -> Tensor:
        """Return [rows, h] with row r = x[source[r]]. Its gradient is ``sum_rows`` without weights."""

    def sum_rows(self, y: Tensor, place: Tensor, weight: Tensor | None) -> Tensor:
        """Return [tokens, h], of each token the sum of weight[t, j] · y[place[t, j]]; -1 is left out."""

    def sum_rows_backward(self, grad: Tensor, y: Tensor, place: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return (dy [rows, h], dweight [tokens, k]); ``place`` names each row once."""

    def route(self, logits: Tensor, bias: Tensor | None, routing: Routing, given: Tensor | None = None) -> Routed:
        """Return where tokens go: to the best experts by score + bias, or to ``given`` ones int64 [tokens, k]."""

    def route_backward(
        self, scores: Tensor, experts: Tensor, dweights: Tensor | None, dscores: Tensor | None, routing: Routing
    ) -> Tensor:
        """Return the logits' gradient from those of the weights and of the scores."""


class TorchExperts:
    """Router and rows in torch ops."""

    gather_rows = staticmethod(expert_rows.gather_rows)
    sum_rows = staticmethod(expert_rows.sum_rows)
    sum_rows_backward = staticmethod(expert_rows.sum_rows_backward)
    route = staticmethod(router.route)
    route_backward = staticmethod(router.route_backward)


class OwnExperts:
    """Router and rows through ``backend.ops``; ``kernels.load`` must have run."""

    def gather_rows(self, x: Tensor, source: Tensor) -> Tensor:
        return own_rows.gather_rows(x.contiguous(), source)

    def sum_rows(self, y: Tensor, place: Tensor, weight: Tensor | None) -> Tensor:
        return own_rows.sum_rows(y.contiguous(), place, weight)

    def sum_rows_backward(self, grad: Tensor, y: Tensor, place: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return own_rows.sum_rows_backward(grad.contiguous(), y, place, weight)

    def route(self, logits: Tensor, bias: Tensor | None, routing: Routing, given: Tensor | None = None) -> Routed:
        return Routed(*own_router.route(
            logits.contiguous(), bias, None if given is None else given.contiguous(), k=routing.k,
            sigmoid=routing.score == "sigmoid", groups=routing.groups, top_groups=routing.top_groups,
            two=routing.group_score == "top2", normalise=routing.normalise, scale=routing.scale,
        ))

    def route_backward(
        self, scores: Tensor, experts: Tensor, dweights: Tensor | None, dscores: Tensor | None, routing: Routing
    ) -> Tensor:
        return own_router.route_backward(
            scores, experts, None if dweights is None else dweights.contiguous(),
            None if dscores is None else dscores.contiguous(), sigmoid=routing.score == "sigmoid",
            normalise=routing.normalise, scale=routing.scale,
        )


def own_limit(experts: int, top_k: int, groups: int) -> str:
    """Return why the own router cannot serve a layer of this size, or nothing."""
    most, choices = own_router.MOST_EXPERTS, own_router.MOST_CHOICES
    if experts <= most and top_k <= choices and groups <= choices:
        return ""
    return (f"the own router takes at most {most} experts, {choices} choices and {choices} groups, not {experts}, "
            f"{top_k} and {groups}")


torch_experts: ExpertOps = TorchExperts()
own_experts: ExpertOps = OwnExperts()
