"""The three matrix products of a linear layer: forward y = x Wᵀ, dgrad dx = dy W and wgrad dW = dyᵀ x."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_port.core.dist.compat import widening_addmm
from megatron_port.core.layers import fused as cpu_upcast


def add_product(main_grad: Tensor, a: Tensor, b: Tensor, *, first: bool = False, scale: float = 1.0) -> None:
    """Add ``scale`` aᵀ b to ``main_grad`` [n, m], in its dtype; a [k, n], b [k, m] have the same or a narrower dtype.

    ``first``: write it over what ``main_grad`` holds, which is not read.
    """
    if main_grad.dtype == torch.float32 != a.dtype and widening_addmm(a.device, a.dtype):
        mm, addmm = _WIDENING
        if scale != 1.0:
            add_to_sum(main_grad, mm(a.t(), b, out_dtype=torch.float32).mul_(scale), first)
        elif first:
            mm(a.t(), b, out_dtype=torch.float32, out=main_grad)
        else:
            addmm(main_grad, a.t(), b, out_dtype=torch.float32, out=main_grad)
        return
    if a.dtype != main_grad.dtype and a.device.type != "cpu":
        product = a.t().mm(b)
        add_to_sum(main_grad, product if scale == 1.0 else product.to(main_grad.dtype).mul_(scale), first)
        return
    # On a CPU in the sum's dtype: no product to round, and none to add in a pass of its own.
    left, right = a.t().to(main_grad.dtype), b.to(main_grad.dtype)
    if first:
        torch.mm(left, right, out=main_grad)
        if scale != 1.0:
            main_grad.mul_(scale)
    else:
        main_grad.addmm_(left, right, alpha=scale)


_WIDENING: tuple[Any, Any] = (torch.mm, torch.addmm)
"""Both also take ``out_dtype``, which their types do not know."""


def add_to_sum(main_grad: Tensor, product: Tensor, first: bool) -> None:
    """Add a product to a sum of gradients; ``first``: write it over what the sum holds."""
    if first:
        main_grad.copy_(product)
    else:
        main_grad.add_(product)


class LinearKernels(Protocol):
    """The products of one linear layer. ``weight_2d`` [out, in] is a view of the parameter ``weight``."""

    def forward(
        self, x: Tensor, weight: Tensor, weight_2d: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return y = x Wᵀ + b [..., out] for x [..., in], and the scale of x for ``wgrad`` (None: it needs none)."""

    def prepare_grad_output(self, grad_output_2d: Tensor) -> tuple[Any, Any]:
        """Return the output gradient [tokens, out] twice: prepared for ``dgrad``, and for ``wgrad``."""

    def dgrad(self, grad_output_2d: Any, weight: Tensor, weight_2d: Tensor) -> Tensor:
        """Gradient of the input, dx = dy W [tokens, in]."""

    def wgrad(self, grad_output_2d: Any, x: Tensor, saved_input_scale: Tensor | None) -> Tensor:
        """Gradient of the weight, dW = dyᵀ x [out, in], in the dtype of x [tokens, in]."""

    def wgrad_accumulate(
        self, main_grad: Tensor, grad_output_2d: Any, x: Tensor, saved_input_scale: Tensor | None, *,
        first: bool = False,
    ) -> None:
        """Add the gradient of the weight to ``main_grad`` [out, in] (float32 or wider) without rounding it first.

        ``first``: ``main_grad`` holds nothing, and the gradient is written over it.
        """


class PlainLinearKernels:
    """Products in the dtype of the operands."""

    def forward(
        self, x: Tensor, weight: Tensor, weight_2d: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return cpu_upcast.linear(x, weight_2d, bias), None

    def prepare_grad_output(self, grad_output_2d: Tensor) -> tuple[Tensor, Tensor]:
        return grad_output_2d, grad_output_2d

    def dgrad(self, grad_output_2d: Tensor, weight: Tensor, weight_2d: Tensor) -> Tensor:
        return cpu_upcast.product(grad_output_2d, weight_2d)

    def wgrad(self, grad_output_2d: Tensor, x: Tensor, saved_input_scale: Tensor | None) -> Tensor:
        return cpu_upcast.product(grad_output_2d.t(), x)

    def wgrad_accumulate(
        self, main_grad: Tensor, grad_output_2d: Tensor, x: Tensor, saved_input_scale: Tensor | None, *,
        first: bool = False,
    ) -> None:
        add_product(main_grad, grad_output_2d, x, first=first)


PLAIN = PlainLinearKernels()


class WeightCopies(Protocol):
    """A step's copies of the weights in another format, each made once."""

    def attach(self, weight: Tensor) -> None:
        """Let the products with a weight find these copies."""

    def active(self, *, backward: bool = True) -> AbstractContextManager[None]:
        """Keep copies until the context ends, in which nobody changes a weight. ``backward``: dgrad will be computed
        too."""


class NarrowProducts(Protocol):
    """A run's products in 8 bits (``kernels.fp8.Fp8``)."""

    def linear_kernels(self) -> LinearKernels:
        """Return the kernels of the model's linear layers."""

    def weight_copies(self) -> WeightCopies:
        """Return where the copies of a model's weights are kept, which may be none yet."""
