"""Linears of two factors, W = B A with A [r, in] and B [out, r].

What tensor-parallel ranks exchange at an end of their region then has r features in place of the residual stream's. A
whole factor is applied by every rank to the tokens that it has, and the other is an ordinary split layer.
"""

from __future__ import annotations

import torch
from torch import nn

from megatron_port.core.layers.linear import Linear, Rows
from megatron_port.core.model.build import BuildContext
from megatron_port.core.model.spec import LinearSpec


class _Factors(nn.Module):
    """Two linears, one after the other: ``low`` (A), then ``high`` (B), whose bias is that of the product."""

    low: Linear
    high: Linear

    @property
    def bias(self) -> nn.Parameter | None:
        """Bias as ``high`` has it: [.., out/tp] where its rows are split, else [out]."""
        return self.high.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.high(self.low(x))
        return out


class FactoredColumnLinear(_Factors):
    """y = B A x + b with B's rows split: [seq(/tp), batch, in] → [seq, batch, packed · out/tp]."""

    def __init__(
        self, layer: str, spec: LinearSpec, build: BuildContext, *, rows: tuple[Rows, Rows] | None, skip_bias: bool
    ) -> None:
        super().__init__()
        low, high = spec.factors
        self.low = build.whole(layer, low)
        self.high = build.column(layer, high, rows=rows, skip_bias=skip_bias)


class FactoredRowLinear(_Factors):
    """y = B A x with A's columns split: [seq, batch, in/tp] → [seq(/tp), batch, out]. The caller adds its ``bias``."""

    def __init__(self, layer: str, spec: LinearSpec, build: BuildContext) -> None:
        super().__init__()
        low, high = spec.factors
        self.low, self.high = build.row(layer, low), build.whole(layer, high)
