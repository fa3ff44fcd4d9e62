"""The feed-forward block: GeLU with two projections, or a gate (Shazeer, arXiv 2002.05202) with a packed one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron_port.core.layers.providers import Providers
from megatron_port.core.layers.step import TallySpec
from megatron_port.core.model.build import BuildContext
from megatron_port.core.model.spec import MLPSpec
from megatron_port.core.registry import PARTS


def activate(
    hidden: torch.Tensor, activation: str, providers: Providers, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the activation [..., ffn] of [..., ffn], or of gate and up side by side [..., 2 * ffn].

    ``bias``: of activations without a gate, [ffn].
    """
    if activation == "swiglu":
        return providers.swiglu(hidden)
    if activation in ("swiglu_clamped", "relu2"):
        found: torch.Tensor = PARTS.function(f"activation, {activation}")(hidden, bias)
        return found
    if activation == "geglu_tanh":
        gate, up = hidden.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up
    return providers.bias_gelu(hidden, bias, approximate=activation == "gelu_tanh")


class FeedForwardBlock(nn.Module):
    """Module of a ``model.spec.FeedForward``."""

    bias: nn.Parameter | None
    """Bias that the caller adds to the result."""
    exchanges = 0
    """Exchanges of rows between ranks in a forward pass."""

    @staticmethod
    def tallies(spec: Any, layers: int) -> Mapping[str, TallySpec]:
        """Return what the block of a spec counts in a step, of a model of ``layers``."""
        return {}

    def after_update(self, totals: Mapping[str, torch.Tensor], skipped: torch.Tensor) -> None:
        """Change buffers by sums of a step's tallies over all ranks, unless its update was ``skipped`` (1 or 0)."""


class MLP(FeedForwardBlock):
    """Feed-forward [seq(/tp), batch, hidden] → same shape, without the bias of ``down``; ffn / tp features per rank."""

    def __init__(self, name: str, index: int, spec: MLPSpec, build: BuildContext) -> None:
        super().__init__()
        self.activation, self.gated, self.providers = spec.activation, spec.gated, build.providers
        self.up = build.column(name, spec.up, skip_bias=not spec.gated)
        self.down = build.row(name, spec.down)

    @property
    def bias(self) -> torch.nn.Parameter | None:  # type: ignore[override]
        """Bias of ``down``, which the caller adds."""
        return self.down.bias

    def activate(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input [seq, batch, ffn/tp] of ``down`` from the output of ``up``."""
        # The bias is added where the activation is computed: one pass over [seq, batch, ffn/tp] less.
        return activate(hidden, self.activation, self.providers, None if self.gated else self.up.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.activate(self.up(x)))
        return out
