"""The feed-forward block: GeLU with two projections, or SwiGLU (Shazeer, arXiv 2002.05202) with a packed one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron_port.model.build import BuildContext
from megatron_port.parallel.linear import ColumnParallelLinear, RowParallelLinear


class MLP(nn.Module):
    """[seq(/tp), batch, hidden] → the same; ffn / tp features on each rank."""

    def __init__(self, name: str, build: BuildContext) -> None:
        super().__init__()
        cfg = build.model
        self.activation = cfg.activation
        common: dict[str, Any] = {"ctx": build.ctx, "sequence_parallel": build.sequence_parallel, "bias": cfg.add_bias,
                  "dtype": build.dtype}
        self.up = ColumnParallelLinear(
            f"{name}.up", cfg.hidden_size, cfg.ffn_size, init=build.init,
            packed=2 if cfg.activation == "swiglu" else 1, **common,
        )
        self.down = RowParallelLinear(f"{name}.down", cfg.ffn_size, cfg.hidden_size, init=build.output_init, **common)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        if self.activation == "swiglu":
            gate, up = y.chunk(2, dim=-1)
            return self.down(F.silu(gate) * up)
        return self.down(F.gelu(y, approximate="tanh" if self.activation == "gelu_tanh" else "none"))
