"""Linear layers split over tensor-parallel ranks (Shoeybi et al., arXiv 1909.08053).

``ColumnParallelLinear`` splits the output features, ``RowParallelLinear`` the
input features; between the two nothing is communicated. With sequence
parallelism (Korthikanti et al., arXiv 2205.05198) the region's entry gathers
the sequence and its exit reduce-scatters it, in place of the two all-reduces.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megatron_port.parallel.collectives import copy_to_tp, gather_sequence, reduce_from_tp, reduce_scatter_sequence
from megatron_port.parallel.context import ParallelContext
from megatron_port.parallel.record import InitSpec, attach, split_record


class ColumnParallelLinear(nn.Module):
    """y = x Wᵀ + b with W's rows split: [seq(/tp), batch, in] → [seq, batch, packed * out/tp].

    ``packed`` > 1 keeps that many matrices of ``out_features`` rows in one
    parameter of logical shape (packed, out, in), each split by its own rows, so
    that one matrix product serves them all (SwiGLU's gate and up projections).
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        ctx: ParallelContext,
        sequence_parallel: bool,
        bias: bool,
        init: InitSpec,
        packed: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.ctx, self.sequence_parallel = ctx, sequence_parallel
        lead = (packed,) if packed > 1 else ()
        split = {"tp_rank": ctx.coords.tp, "tp_size": ctx.topology.tp, "split_dim": len(lead)}
        record = split_record(f"{name}.weight", (*lead, out_features, in_features), init=init, decay=True, **split)
        self.weight = attach(nn.Parameter(torch.empty(record.local_shape, dtype=dtype, device=ctx.device)), record)
        self.bias: nn.Parameter | None = None
        if bias:
            record = split_record(f"{name}.bias", (*lead, out_features), init=InitSpec("zeros"), decay=False, **split)
            self.bias = attach(nn.Parameter(torch.empty(record.local_shape, dtype=dtype, device=ctx.device)), record)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = gather_sequence(x, self.ctx.tp_group) if self.sequence_parallel else copy_to_tp(x, self.ctx.tp_group)
        bias = self.bias.flatten() if self.bias is not None else None
        return F.linear(x, self.weight.flatten(0, -2), bias)


class RowParallelLinear(nn.Module):
    """y = x Wᵀ + b with W's columns split: [seq, batch, in/tp] → [seq(/tp), batch, out].

    The bias is whole on every rank and added once, after the sum. Under
    sequence parallelism each rank adds it to its own tokens, so its gradient is
    partial and the record says so.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        ctx: ParallelContext,
        sequence_parallel: bool,
        bias: bool,
        init: InitSpec,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.ctx, self.sequence_parallel = ctx, sequence_parallel
        record = split_record(
            f"{name}.weight", (out_features, in_features), init=init, decay=True,
            split_dim=1, tp_rank=ctx.coords.tp, tp_size=ctx.topology.tp,
        )
        self.weight = attach(nn.Parameter(torch.empty(record.local_shape, dtype=dtype, device=ctx.device)), record)
        self.bias: nn.Parameter | None = None
        if bias:
            record = split_record(
                f"{name}.bias", (out_features,), init=InitSpec("zeros"), decay=False,
                partial_grad_over_tp=sequence_parallel and ctx.topology.tp > 1,
            )
            self.bias = attach(nn.Parameter(torch.empty(record.local_shape, dtype=dtype, device=ctx.device)), record)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.weight)
        group = self.ctx.tp_group
        y = reduce_scatter_sequence(y, group) if self.sequence_parallel else reduce_from_tp(y, group)
        return y if self.bias is None else y + self.bias
