"""The feed-forward block: GeLU with two projections, or SwiGLU (Shazeer, arXiv 2002.05202) with a packed one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatron_port.model.build import BuildContext
from megatron_port.parallel.linear import ColumnParallelLinear, RowParallelLinear


class MLP(nn.Module):
    """[seq(/tp), batch, hidden] → the same, without the bias of ``down``; ffn / tp features on each rank."""

    def __init__(self, name: str, build: BuildContext) -> None:
        super().__init__()
        cfg = build.model
        self.activation, self.providers = cfg.activation, build.providers
        common: dict[str, Any] = {"ctx": build.ctx, "sequence_parallel": build.sequence_parallel, "bias": cfg.add_bias,
                  "dtype": build.dtype, "kernels": build.kernels}
        self.up = ColumnParallelLinear(
            f"{name}.up", cfg.hidden_size, cfg.ffn_size, init=build.init,
            packed=2 if cfg.activation == "swiglu" else 1, skip_bias=cfg.activation != "swiglu", **common,
        )
        self.down = RowParallelLinear(f"{name}.down", cfg.ffn_size, cfg.hidden_size, init=build.output_init,
                                      skip_bias=True, **common)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.activation == "swiglu":
            return self.down(self.providers.swiglu(self.up(x)))
        # The bias is added where the activation is computed: one pass over [seq, batch, ffn/tp] less.
        y = self.up(x)
        return self.down(self.providers.bias_gelu(y, self.up.bias, approximate=self.activation == "gelu_tanh"))
