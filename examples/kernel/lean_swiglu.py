"""A kernel provider from outside the package: a SwiGLU that keeps its input alone.

torch's autograd keeps the sigmoid branch and both halves between forward and backward; this one computes them again. A
provider may as well call a compiled library: what the package asks for is the function.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_port.core.dist.rank import DeviceInfo
from megatron_port.core.layers.fused import torch_bias_gelu
from megatron_port.core.registry import PROVIDERS
from megatron_port.ext.kernels.choose import Candidate


class _LeanSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        sigmoid = gate.sigmoid()
        to_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
        return torch.cat([to_gate, grad * gate * sigmoid], dim=-1)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """Return silu(first half) * second half of the last dimension: [..., 2f] → [..., f]."""
    return _LeanSwiGLU.apply(x)


def lean(device: DeviceInfo, dtype: torch.dtype) -> Candidate:
    """Return the provider of op ``activation``, which is a pair: bias + GeLU (here torch's), and SwiGLU."""
    problem = "" if dtype.is_floating_point and dtype.itemsize > 1 else f"no gradient in {dtype}"
    return Candidate("lean", problem, lambda: (torch_bias_gelu, swiglu), note="keeps its input alone")


PROVIDERS["activation"].add("lean", lean)
