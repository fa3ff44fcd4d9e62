"""The router's choice, weights and scores, with the logits' gradient; ``layers.expert_choice`` says what is
computed."""

from __future__ import annotations

from typing import Any

import torch

from megatron_port.core.layers.expert_choice import Routed, Routing
from megatron_port.core.layers.experts import ExpertOps
from megatron_port.core.layers.fused import FirstOrderFunction, first_order


class _Routed(FirstOrderFunction):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, bias: torch.Tensor | None, given: torch.Tensor | None, routing: Routing,
        ops: ExpertOps,
    ) -> tuple[torch.Tensor, ...]:
        out = ops.route(logits, bias, routing, given)
        ctx.save_for_backward(out.scores, out.experts)
        ctx.routing, ctx.ops = routing, ops
        ctx.mark_non_differentiable(out.experts, out.margin)
        ctx.set_materialize_grads(False)
        return tuple(out)

    @staticmethod
    @first_order
    def backward(ctx: Any, _experts: None, dweights: Any, dscores: Any, _margin: None) -> Any:
        scores, experts = ctx.saved_tensors
        return ctx.ops.route_backward(scores, experts, dweights, dscores, ctx.routing), None, None, None, None


def routed(
    logits: torch.Tensor, bias: torch.Tensor | None, given: torch.Tensor | None, routing: Routing, ops: ExpertOps
) -> Routed:
    """Return where the tokens of ``logits`` [tokens, E] go; the gradient flows through weights and scores.

    ``bias`` float32 [E]: of the choice alone. ``given`` int64 [tokens, k]: experts in place of a choice.
    """
    return Routed(*_Routed.apply(logits, bias, given, routing, ops))
