"""A layer's linears as their specs say: of one matrix, or of two factors, W = B A with A [r, in] and B [out, r].

What tensor-parallel ranks exchange at an end of their region then has r features in place of the residual stream's. A
whole factor is applied by every rank to the tokens that it has, and the other is an ordinary split layer.
"""

from __future__ import annotations

import torch
from torch import nn

from megatron_port.core.layers.linear import ColumnParallelLinear, RowParallelLinear, Rows, linear
from megatron_port.core.model.build import BuildContext
from megatron_port.core.model.spec import LinearSpec


class UnsplitLinear(nn.Module):
    """A product that is not split: [seq(/tp), batch, in] → [seq(/tp), batch, out]. The caller adds its ``bias``."""

    def __init__(self, layer: str, spec: LinearSpec, build: BuildContext) -> None:
        super().__init__()
        weight, *bias = spec.parameters
        self.weight, self.kernels = build.unsplit(weight, layer), build.kernels
        self.bias = build.unsplit(bias[0], layer) if bias else None
        self.adapter = build.adapter(layer, spec)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.adapter is not None:
            out: torch.Tensor = self.adapter(x, (self.weight,), None, group=None, sequence=False, kernels=self.kernels)
            return out
        return linear(x, self.weight, kernels=self.kernels)


class _Factors(nn.Module):
    """Two linears, one after the other: ``low`` (A), then ``high`` (B), whose bias is that of the product."""

    low: nn.Module
    high: ColumnParallelLinear | UnsplitLinear

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
        self.low = UnsplitLinear(layer, low, build)
        self.high = build.column(layer, high, rows=rows, skip_bias=skip_bias)


class FactoredRowLinear(_Factors):
    """y = B A x with A's columns split: [seq, batch, in/tp] → [seq(/tp), batch, out]. The caller adds its ``bias``."""

    def __init__(self, layer: str, spec: LinearSpec, build: BuildContext) -> None:
        super().__init__()
        low, high = spec.factors
        self.low, self.high = build.row(layer, low), UnsplitLinear(layer, high, build)
        self.sequence_parallel = build.sequence_parallel


Column = ColumnParallelLinear | FactoredColumnLinear
Row = RowParallelLinear | FactoredRowLinear


def column_linear(
    layer: str, spec: LinearSpec, build: BuildContext, *, rows: tuple[Rows, Rows] | None = None, skip_bias: bool = False
) -> Column:
    """Build a linear layer with its outputs split, of one matrix or of two factors."""
    if spec.rank:
        return FactoredColumnLinear(layer, spec, build, rows=rows, skip_bias=skip_bias)
    return build.column(layer, spec, rows=rows, skip_bias=skip_bias)


def row_linear(layer: str, spec: LinearSpec, build: BuildContext) -> Row:
    """Build a linear layer with its inputs split, of one matrix or of two factors; the caller adds its bias."""
    return FactoredRowLinear(layer, spec, build) if spec.rank else build.row(layer, spec)
