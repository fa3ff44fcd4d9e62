"""Values that few bits can say: the grid on which weights compute while they are trained for it.

A group is ``group_size`` neighbours along the inputs of a row of the logical matrix, and has one scale, in float32.
For b bits the scale is the smallest at which nothing lies beyond [-2^(b-1), 2^(b-1) - 1]: torchao's
``SYMMETRIC_NO_CLIPPING_ERR``, so that post-training quantisation of what was trained gives the weights that it was
trained with. As nothing is clipped, the straight-through gradient (Bengio et al., arXiv 1308.3432) is the identity.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from megatron_port.core.config.features import QuantisationConfig
from megatron_port.core.layers.linear import LinearKernels, PlainLinearKernels

BITS = {"int8": 8, "int4": 4}


def on_grid(weight: torch.Tensor, kind: str, group_size: int) -> torch.Tensor:
    """Return a matrix [rows, inputs] with each element at the nearest value that ``kind`` can say, in its dtype.

    ``kind``: int8 | int4 | binary. ``group_size`` divides the inputs.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    groups = weight.detach().to(wide).unflatten(-1, (-1, group_size))
    if kind == "binary":
        size = groups.abs().mean(dim=-1, keepdim=True)
        found = torch.where(groups < 0, -size, size)
    else:
        most = 1 << BITS[kind] - 1
        low, high = groups.amin(dim=-1, keepdim=True), groups.amax(dim=-1, keepdim=True)
        scale = torch.maximum(low / -most, high / (most - 1)).clamp_(min=torch.finfo(wide).tiny)
        found = (groups * (1.0 / scale)).round_().clamp_(-most, most - 1).mul_(scale)
    return found.flatten(-2).to(weight.dtype)


class FewBitLinearKernels(PlainLinearKernels):
    """Products with weights on a grid of few bits (:func:`on_grid`), computed anew for each pass; the gradient of
    the weight is that of its value on the grid."""

    def __init__(self, few_bits: QuantisationConfig) -> None:
        self.group_size = few_bits.group_size
        self.grid = partial(on_grid, kind=few_bits.weights, group_size=few_bits.group_size)

    def forward(
        self, x: Tensor, weight: Tensor, weight_2d: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return super().forward(x, weight, self.grid(weight_2d), bias)

    def dgrad(self, grad_output_2d: Tensor, weight: Tensor, weight_2d: Tensor) -> Tensor:
        return super().dgrad(grad_output_2d, weight, self.grid(weight_2d))


def forward_operand(kernels: LinearKernels, weight_2d: Tensor) -> Tensor:
    """Return the weight that a forward product sees, for products that are not computed by ``kernels`` themselves."""
    return kernels.grid(weight_2d) if isinstance(kernels, FewBitLinearKernels) else weight_2d
