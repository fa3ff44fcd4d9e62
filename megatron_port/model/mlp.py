"""The feed-forward block: GeLU with two projections, or a gate (Shazeer, arXiv 2002.05202) with a packed one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megatron_port.model.build import BuildContext
from megatron_port.model.spec import MLPSpec


class MLP(nn.Module):
    """Feed-forward [seq(/tp), batch, hidden] → same shape, without the bias of ``down``; ffn / tp features per rank."""

    def __init__(self, layer: str, spec: MLPSpec, build: BuildContext) -> None:
        super().__init__()
        self.activation, self.providers = spec.activation, build.providers
        self.up = build.column(layer, spec.up, skip_bias=not spec.gated)
        self.down = build.row(layer, spec.down)

    def activate(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input [seq, batch, ffn/tp] of ``down`` from the output of ``up``."""
        if self.activation == "swiglu":
            return self.providers.swiglu(hidden)
        if self.activation == "geglu_tanh":
            gate, up = hidden.chunk(2, dim=-1)
            return F.gelu(gate, approximate="tanh") * up
        # The bias is added where the activation is computed: one pass over [seq, batch, ffn/tp] less.
        return self.providers.bias_gelu(hidden, self.up.bias, approximate=self.activation == "gelu_tanh")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.activate(self.up(x)))
        return out
