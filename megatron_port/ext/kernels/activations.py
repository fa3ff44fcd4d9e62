"""Activations that few models have, in torch's operations: only their inputs are kept for the backward pass."""

from __future__ import annotations

from typing import Any

import torch

from megatron_port.core.config.model import CLAMP, SHARPNESS
from megatron_port.core.layers.fused import FirstOrderFunction, first_order


class ClampedSwiGLU(FirstOrderFunction):
    """g · sigmoid(1.702 g) · (u + 1) of halves g ≤ 7 and -7 ≤ u ≤ 7."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
        return (up + 1) * (gate * torch.sigmoid(SHARPNESS * gate))

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        free, inside = gate <= CLAMP, up.abs() <= CLAMP
        gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
        share = torch.sigmoid(SHARPNESS * gate)
        slope = share * (1 + SHARPNESS * gate * (1 - share))
        return torch.cat((grad * (up + 1) * slope * free, grad * gate * share * inside), dim=-1)


def clamped_swiglu(hidden: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return it of gate and up side by side, which have no bias of their own."""
    found: torch.Tensor = ClampedSwiGLU.apply(hidden)
    return found


class SquaredReLU(FirstOrderFunction):
    """max(x + bias, 0)²"""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, bias)
        return _positive(x, bias).square_()

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, bias = ctx.saved_tensors
        found = _positive(x, bias).mul_(2).mul_(grad)
        return found, None if bias is None else found.flatten(0, -2).sum(0)


def _positive(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return max(x + bias, 0), memory of its own."""
    return x.clamp(min=0) if bias is None else (x + bias).clamp_(min=0)


def squared_relu(hidden: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return it of ``hidden`` and its bias."""
    found: torch.Tensor = SquaredReLU.apply(hidden, bias)
    return found
