"""The own provider of a layer of experts: the router and the moving of rows by own kernels (``layers.experts``)."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from megatron_port.ext.kernels.ops import expert_rows
from megatron_port.ext.kernels.ops import route as router


class Routed(NamedTuple):
    """Result of the router (``layers.expert_choice.Routed``)."""

    experts: Tensor
    weights: Tensor
    scores: Tensor
    margin: Tensor


class OwnExperts:
    """Router and rows through ``kernels.ops`` (``layers.experts.ExpertOps``); ``kernels.load`` must have run."""

    def gather_rows(self, x: Tensor, source: Tensor) -> Tensor:
        return expert_rows.gather_rows(x.contiguous(), source)

    def sum_rows(self, y: Tensor, place: Tensor, weight: Tensor | None) -> Tensor:
        return expert_rows.sum_rows(y.contiguous(), place, weight)

    def sum_rows_backward(self, grad: Tensor, y: Tensor, place: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return expert_rows.sum_rows_backward(grad.contiguous(), y, place, weight)

    def route(self, logits: Tensor, bias: Tensor | None, routing: Any, given: Tensor | None = None) -> Routed:
        return Routed(*router.route(
            logits.contiguous(), bias, None if given is None else given.contiguous(), k=routing.k,
            sigmoid=routing.score == "sigmoid", groups=routing.groups, top_groups=routing.top_groups,
            two=routing.group_score == "top2", normalise=routing.normalise, scale=routing.scale,
        ))

    def route_backward(
        self, scores: Tensor, experts: Tensor, dweights: Tensor | None, dscores: Tensor | None, routing: Any
    ) -> Tensor:
        return router.route_backward(
            scores, experts, None if dweights is None else dweights.contiguous(),
            None if dscores is None else dscores.contiguous(), sigmoid=routing.score == "sigmoid",
            normalise=routing.normalise, scale=routing.scale,
        )


def own_limit(experts: int, top_k: int, groups: int) -> str:
    """Return why the own router cannot serve a layer of this size, or nothing."""
    most, choices = router.MOST_EXPERTS, router.MOST_CHOICES
    if experts <= most and top_k <= choices and groups <= choices:
        return ""
    return (f"the own router takes at most {most} experts, {choices} choices and {choices} groups, not {experts}, "
            f"{top_k} and {groups}")


own_experts = OwnExperts()
