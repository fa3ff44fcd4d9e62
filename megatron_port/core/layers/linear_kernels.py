"""The three matrix products of a linear layer: forward y = x Wᵀ, dgrad dx = dy W and wgrad dW = dyᵀ x.

They run in the compute dtype or in 8 bits (``precision.fp8``). The ``tensorwise`` recipe has one scale per tensor:
inputs and weights are e4m3, gradients, whose values spread wider, e5m2, and all three products run in 8 bits. The
``rowwise`` recipe has one scale for each row of the left and each column of the right operand, all in e4m3; its wgrad,
whose sum over tokens suffers most from single large values, stays in bf16. Both accumulate in fp32. The recipes are
torchao's ``tensorwise`` and ``rowwise_with_gw_hp``, except that scales are powers of two (``kernels.fp8`` says why).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_port.core.config.quantisation import NO_QUANTISATION, QuantisationConfig
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


@dataclass(frozen=True)
class Quantised:
    """A matrix in 8 bits: ``values`` [rows, columns] contiguous; ``values`` × ``inverse`` is the matrix."""

    values: Tensor
    inverse: Tensor
    """fp32 powers of two, [1, 1] or, with a scale for each row, [rows, 1]."""
    rowwise: bool

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix."""
        return self.values.shape

    def transposed(self) -> Quantised:
        """The transposed matrix; only with one scale for the tensor."""
        assert not self.rowwise, "scales of rows are not scales of columns"
        return Quantised(self.values.t().contiguous(), self.inverse, False)


class QuantizedWeightCache:
    """Cache of a step's 8-bit copies of the weights; an engine attaches it to them as ``quantized_weight_cache``.

    It caches only inside :meth:`active`, while the engine changes no weight, so each copy is made once per step.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[int, str], Quantised] | None = None
        self._backward = False

    @contextmanager
    def active(self, *, backward: bool = True) -> Iterator[None]:
        """Cache copies until the context ends, then drop them. ``backward``: dgrad will be computed too."""
        self._copies, self._backward = {}, backward
        try:
            yield
        finally:
            self._copies = None

    def get(self, weight: Tensor, name: str, make: Callable[[], Quantised]) -> Quantised:
        """Return the weight's copy called ``name``, made by ``make`` unless it is cached."""
        if self._copies is None:
            return make()
        key = (id(weight), name)
        if key not in self._copies:
            self._copies[key] = make()
        return self._copies[key]

    def pair(
        self, weight: Tensor, which: str, one: Callable[[], Quantised], both: Callable[[], tuple[Quantised, Quantised]]
    ) -> Quantised:
        """Return the weight's copy ``which`` ("rows" or "columns"); both are made at once if dgrad needs the other."""
        if self._copies is None or not self._backward:
            return self.get(weight, which, one)
        if (id(weight), which) not in self._copies:
            self._copies[id(weight), "rows"], self._copies[id(weight), "columns"] = both()
        return self._copies[id(weight), which]

    def bytes_held(self) -> int:
        """Bytes of the cached copies, without their scales."""
        return sum(copy.values.numel() for copy in (self._copies or {}).values())


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


# Values that few bits can say: the grid on which weights compute while they are trained for it.
#
# A group is ``group_size`` neighbours along the inputs of a row of the logical matrix, and has one scale, in float32.
# For b bits the scale is the smallest at which nothing lies beyond [-2^(b-1), 2^(b-1) - 1]: torchao's
# ``SYMMETRIC_NO_CLIPPING_ERR``, so that post-training quantisation of what was trained gives the weights that it was
# trained with. As nothing is clipped, the straight-through gradient (Bengio et al., arXiv 1308.3432) is the identity.

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


class EightBits(Protocol):
    """A run's products in 8 bits (``kernels.fp8.Fp8``)."""

    def linear_kernels(self) -> LinearKernels:
        """Return the kernels of the model's linear layers."""


def make_linear_kernels(fp8: EightBits | None, few_bits: QuantisationConfig = NO_QUANTISATION) -> LinearKernels:
    """Return the kernels of a model's linear layers; without either in the compute dtype."""
    if few_bits.enabled:
        return FewBitLinearKernels(few_bits)
    return PLAIN if fp8 is None else fp8.linear_kernels()
