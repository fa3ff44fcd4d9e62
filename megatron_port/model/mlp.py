"""The feed-forward block: GeLU with two projections, or SwiGLU (Shazeer, arXiv 2002.05202) with a packed one."""

from __future__ import annotations

import torch
from torch import nn

from megatron_port.model.build import BuildContext
from megatron_port.model.spec import MLPSpec


class MLP(nn.Module):
    """Feed-forward [seq(/tp), batch, hidden] → same shape, without the bias of ``down``; ffn / tp features per rank."""

    def __init__(self, layer: str, spec: MLPSpec, build: BuildContext) -> None:
        super().__init__()
        self.activation, self.providers = spec.activation, build.providers
        self.up = build.column(layer, spec.up, skip_bias=spec.activation != "swiglu")
        self.down = build.row(layer, spec.down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.activation == "swiglu":
            out: torch.Tensor = self.down(self.providers.swiglu(self.up(x)))
        else:
            # The bias is added where the activation is computed: one pass over [seq, batch, ffn/tp] less.
            approximate = self.activation == "gelu_tanh"
            out = self.down(self.providers.bias_gelu(self.up(x), self.up.bias, approximate=approximate))
        return out
