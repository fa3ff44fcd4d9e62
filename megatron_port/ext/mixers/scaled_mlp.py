"""The module of a feed-forward block whose gate and whose result are scaled: only their inputs are kept."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import silu

from megatron_port.core.layers.fused import FirstOrderFunction, first_order
from megatron_port.core.model.build import BuildContext
from megatron_port.core.model.mlp import MLP
from megatron_port.ext.mixers.scaled_mlp_spec import ScaledMLPSpec


class ScaledSwiGLU(FirstOrderFunction):
    """f · silu(e g) · u of halves g and u, and of factors e and f."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, of_gate: float, of_all: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.factors = of_gate, of_all
        gate, up = x.chunk(2, dim=-1)
        return silu(gate * of_gate).mul_(up).mul_(of_all)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,), (of_gate, of_all) = ctx.saved_tensors, ctx.factors
        gate, up = x.chunk(2, dim=-1)
        gate, grad = gate * of_gate, grad * of_all
        share = gate.sigmoid()
        slope = share * (1 + gate * (1 - share))
        return torch.cat((grad * up * slope * of_gate, grad * gate * share), dim=-1), None, None


class ScaledMLP(MLP):
    """Feed-forward block whose activation is :class:`ScaledSwiGLU`."""

    def __init__(self, name: str, index: int, spec: ScaledMLPSpec, build: BuildContext) -> None:
        super().__init__(name, index, spec, build)
        self.multipliers = spec.multipliers

    def activate(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = ScaledSwiGLU.apply(hidden, *self.multipliers)
        return found
