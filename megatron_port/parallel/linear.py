"""Linear layers split over tensor-parallel ranks (Shoeybi et al., arXiv 1909.08053).

``ColumnParallelLinear`` splits the output features, ``RowParallelLinear`` the
input features; between the two nothing is communicated. With sequence
parallelism (Korthikanti et al., arXiv 2205.05198) the region's entry gathers
the sequence and its exit reduce-scatters it, in place of the two all-reduces.

``linear`` adds a weight's gradient straight to ``weight.main_grad`` where an
engine has set one: no gradient of the weight's own dtype is made, rounded and
added up.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from megatron_port.parallel.collectives import copy_to_tp, gather_sequence, reduce_from_tp, reduce_scatter_sequence
from megatron_port.parallel.compat import widening_addmm
from megatron_port.parallel.context import ParallelContext
from megatron_port.parallel.record import InitSpec, attach, split_record


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += aᵀ b in the dtype of ``total``: [n, m], a [k, n], b [k, m] of the same or a narrower dtype."""
    if a.dtype == total.dtype:
        total.addmm_(a.t(), b)
    elif total.dtype == torch.float32 and widening_addmm(a.device, a.dtype):
        addmm: Any = torch.addmm
        addmm(total, a.t(), b, out_dtype=torch.float32, out=total)
    elif a.device.type == "cpu":  # its half-precision products are slower than float32 ones
        total.addmm_(a.t().to(total.dtype), b.to(total.dtype))
    else:
        total.add_(a.t().mm(b))


class _LinearIntoMainGrad(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, main_grad: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        # Not a saved tensor: every micro-batch changes it between a forward and its backward.
        ctx.main_grad = main_grad
        return F.linear(x, weight.flatten(0, -2), bias)

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, None, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        weight = weight.flatten(0, -2)
        rows = grad.reshape(-1, weight.shape[0])
        add_product(ctx.main_grad.view(weight.shape), rows, x.reshape(-1, weight.shape[1]))
        dx = rows.mm(weight).view(x.shape) if ctx.needs_input_grad[0] else None
        return dx, None, rows.sum(dim=0) if ctx.needs_input_grad[2] else None, None


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x Wᵀ + b: x [..., in], weight [..., in] whose leading dimensions are the outputs, bias [out] → [..., out].

    Where ``weight`` has a contiguous ``main_grad`` of its shape, in float32 or wider, the backward pass adds the
    weight's gradient to that and autograd gets none for it (other uses of the weight keep theirs).
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None or not weight.requires_grad:
        return F.linear(x, weight.flatten(0, -2), bias)
    return _LinearIntoMainGrad.apply(x, weight, bias, main_grad)


class ColumnParallelLinear(nn.Module):
    """y = x Wᵀ + b with W's rows split: [seq(/tp), batch, in] → [seq, batch, packed * out/tp].

    ``packed`` > 1 keeps that many matrices of ``out_features`` rows in one
    parameter of logical shape (packed, out, in), each split by its own rows, so
    that one matrix product serves them all (SwiGLU's gate and up projections).
    ``skip_bias``: b is a parameter that the caller adds, fused with what follows.
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
        skip_bias: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.ctx, self.sequence_parallel, self.skip_bias = ctx, sequence_parallel, skip_bias
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
        bias = self.bias.flatten() if self.bias is not None and not self.skip_bias else None
        return linear(x, self.weight, bias)


class RowParallelLinear(nn.Module):
    """y = x Wᵀ + b with W's columns split: [seq, batch, in/tp] → [seq(/tp), batch, out].

    The bias is whole on every rank and added once, after the sum. Under
    sequence parallelism each rank adds it to its own tokens, so its gradient is
    partial and the record says so. ``skip_bias``: the caller adds it, with the residual.
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
        skip_bias: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.ctx, self.sequence_parallel, self.skip_bias = ctx, sequence_parallel, skip_bias
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
        y = linear(x, self.weight)
        group = self.ctx.tp_group
        y = reduce_scatter_sequence(y, group) if self.sequence_parallel else reduce_from_tp(y, group)
        return y if self.bias is None or self.skip_bias else y + self.bias
