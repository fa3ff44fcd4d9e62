"""Half-precision matrix products on a CPU whose instructions have none: by float32, 10 to 20 times faster there.

torch's own products of bf16 and fp16 matrices on such a processor (AVX2: most CI machines, a Frontier node's EPYC)
convert element by element. Both ways sum in float32 and round the sum once, so they differ in the order of sums alone.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_port.core.layers.direct import FirstOrderFunction, first_order

_INSTRUCTIONS = {
    torch.bfloat16: ("_is_avx512_bf16_supported", "_is_amx_tile_supported"),
    torch.float16: ("_is_avx512_fp16_supported", "_is_amx_fp16_supported"),
}
"""Queries of torch.cpu by dtype; a query that this torch lacks counts as no."""


@functools.cache
def _has_instructions(dtype: torch.dtype) -> bool:
    asked = (getattr(torch.cpu, name, None) for name in _INSTRUCTIONS[dtype])
    return any(ask is not None and bool(ask()) for ask in asked)


def widens(x: Tensor) -> bool:
    """Return whether products of ``x`` are faster in float32."""
    return x.is_cpu and x.dtype in _INSTRUCTIONS and not _has_instructions(x.dtype)


class _Product(FirstOrderFunction):
    """Keeps its operands for the backward pass as they came, not as float32."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return (a.float() @ b.float()).to(a.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        a, b = ctx.saved_tensors
        wide = grad.float()
        da = (wide @ b.float().mT).to(a.dtype) if ctx.needs_input_grad[0] else None
        db = (a.float().mT @ wide).to(b.dtype) if ctx.needs_input_grad[1] else None
        return da, db


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in the dtype of both, summed in float32 or wider: [..., m, k], [..., k, n] → [..., m, n].

    The leading dimensions must be the same.
    """
    return _Product.apply(a, b) if widens(a) else a @ b


def linear(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b likewise, rounded after the bias is added: [..., in], [out, in], [out] → [..., out].

    For a pass of its own without autograd, which would keep float32 copies where it widens.
    """
    if not widens(x):
        return F.linear(x, matrix, bias)
    return F.linear(x.float(), matrix.float(), None if bias is None else bias.float()).to(x.dtype)
