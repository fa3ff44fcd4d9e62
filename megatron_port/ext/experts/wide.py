"""Products in float32 of a linear whatever its dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_port.core.layers.linear import add_product


class WideLinearKernels:
    """Products in float32 (float64 in float64) of operands as they come, whose results are not rounded: for routers,
    whose choice between experts must not hang on a rounding."""

    def forward(
        self, x: Tensor, weight: Tensor, weight_2d: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x.to(wide), weight_2d.to(wide), None if bias is None else bias.to(wide)), None

    def prepare_grad_output(self, grad_output_2d: Tensor) -> tuple[Tensor, Tensor]:
        return grad_output_2d, grad_output_2d

    def dgrad(self, grad_output_2d: Tensor, weight: Tensor, weight_2d: Tensor) -> Tensor:
        return (grad_output_2d @ weight_2d.to(grad_output_2d.dtype)).to(weight_2d.dtype)

    def wgrad(self, grad_output_2d: Tensor, x: Tensor, saved_input_scale: Tensor | None) -> Tensor:
        return (grad_output_2d.t() @ x.to(grad_output_2d.dtype)).to(x.dtype)

    def wgrad_accumulate(
        self, main_grad: Tensor, grad_output_2d: Tensor, x: Tensor, saved_input_scale: Tensor | None, *,
        first: bool = False,
    ) -> None:
        add_product(main_grad, grad_output_2d, x.to(grad_output_2d.dtype), first=first)


WIDE = WideLinearKernels()
