"""Half-precision matrix products on a CPU whose instructions have none: by float32, 10 to 20 times faster there.

torch's own products of bf16 and fp16 matrices on such a processor (AVX2: most CI machines, a Frontier node's EPYC)
convert element by element. Both ways sum in float32 and round the sum once, so they differ in the order of sums alone.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

_INSTRUCTIONS = {
    torch.bfloat16: ("_is_avx512_bf16_supported", "_is_amx_tile_supported"),
    torch.float16: ("_is_avx512_fp16_supported", "_is_amx_fp16_supported"),
}
"""What torch.cpu can be asked; by what torch does not know a processor has none."""


@functools.cache
def _has_instructions(dtype: torch.dtype) -> bool:
    asked = (getattr(torch.cpu, name, None) for name in _INSTRUCTIONS[dtype])
    return any(ask is not None and bool(ask()) for ask in asked)


def widens(x: Tensor) -> bool:
    """Whether products of ``x`` are better computed in float32."""
    return x.dtype in _INSTRUCTIONS and x.device.type == "cpu" and not _has_instructions(x.dtype)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in the dtype of both, summed in float32 or wider: [..., m, k], [..., k, n] → [..., m, n]."""
    return (a.float() @ b.float()).to(a.dtype) if widens(a) else a @ b


def linear(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b likewise, rounded after the bias is added: [..., in], [out, in], [out] → [..., out]."""
    if not widens(x):
        return F.linear(x, matrix, bias)
    return F.linear(x.float(), matrix.float(), None if bias is None else bias.float()).to(x.dtype)
