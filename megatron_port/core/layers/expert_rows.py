"""Copies of tokens in the order of their experts, and the sums of what comes back, with their gradients.

``source`` int64 [rows] says which token each row is a copy of, ``place`` int64 [tokens, k] where each token's copies
are (-1: left out, because an expert was full). ``kernels.expert_rows`` says what is computed.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_port.core.layers.direct import FirstOrderFunction, first_order
from megatron_port.core.layers.expert_products import ExpertOps


class _Copies(FirstOrderFunction):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, source: torch.Tensor, place: torch.Tensor, ops: ExpertOps) -> torch.Tensor:
        ctx.save_for_backward(place)
        ctx.ops = ops
        return ops.gather_rows(x, source)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (place,) = ctx.saved_tensors
        return ctx.ops.sum_rows(grad.contiguous(), place, None), None, None, None


class _Combined(FirstOrderFunction):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, place: torch.Tensor, weight: torch.Tensor, ops: ExpertOps) -> torch.Tensor:
        ctx.save_for_backward(y, place, weight)
        ctx.ops = ops
        return ops.sum_rows(y, place, weight)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        y, place, weight = ctx.saved_tensors
        dy, dweight = ctx.ops.sum_rows_backward(grad.contiguous(), y, place, weight)
        return dy, None, dweight, None


def copies(x: torch.Tensor, source: torch.Tensor, place: torch.Tensor, ops: ExpertOps) -> torch.Tensor:
    """Return the rows [rows, h] of tokens ``x`` [tokens, h]; the gradient sums over each token's ``place``."""
    out: torch.Tensor = _Copies.apply(x, source, place, ops)
    return out


def combined(y: torch.Tensor, place: torch.Tensor, weight: torch.Tensor, ops: ExpertOps) -> torch.Tensor:
    """Return of each token [tokens, h] the sum of its rows of ``y`` [rows, h] times ``weight`` [tokens, k], added in
    the order of k in float32 or wider."""
    out: torch.Tensor = _Combined.apply(y, place, weight, ops)
    return out
