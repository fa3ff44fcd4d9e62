"""Attention in products of the packed projection: the numbers of attention written out, and no pass that copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_port.core.dist.positions import Positions
from megatron_port.core.layers.attention import math_attention
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.fused import ProbabilityDropout, torch_causal_softmax, torch_split_rotary
from megatron_port.ext.kernels import kernels
from megatron_port.ext.kernels.ops.softmax import causal_softmax
from megatron_port.ext.kernels.packed_math import packed_math_attention


def dropout_of(p: float, batch: int, seq: int) -> ProbabilityDropout | None:
    stream = DropoutStream(3, torch.device("cpu"))
    stream.set_micro_batch(2, range(batch))
    return stream.probability_dropout(p, op="probs", head_offset=1, positions=Positions.contiguous(seq)) if p else None


def projection(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    drawn = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return drawn.to(dtype).requires_grad_()


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("shape", [(16, 2, 3, 3, 8), (33, 1, 2, 3, 6), (1, 3, 2, 3, 4), (16, 2, 2, 4, 8)])
def test_it_is_attention_written_out(shape: tuple[int, ...], p: float) -> None:
    """Also where a group has two query heads."""
    own, other = projection(*shape), projection(*shape)
    dropout = dropout_of(p, shape[1], shape[0])
    out = packed_math_attention(torch_causal_softmax, torch_split_rotary)(own, dropout=dropout)
    want = math_attention(*torch_split_rotary(other, None, None), dropout=dropout)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-13)
    grad = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    out.backward(grad)
    want.backward(grad)
    assert own.grad is not None and own.grad.is_contiguous()
    torch.testing.assert_close(own.grad, other.grad, rtol=1e-12, atol=1e-13)


class Names(TorchDispatchMode):
    """Names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += [] if func.is_view or "empty" in func.name() else [func.name().split("::")[1]]
        return func(*args, **(kwargs or {}))


def test_every_pass_is_a_product_or_the_softmax() -> None:
    kernels.load("cpu")
    qkv = projection(32, 2, 4, 3, 16, dtype=torch.float32)
    attention = packed_math_attention(causal_softmax, torch_split_rotary)
    with Names() as names:
        out = attention(qkv, dropout=dropout_of(0.2, 2, 32))
        torch.autograd.grad(out, qkv, torch.ones_like(out))
    passes = [name for name in names.seen if name not in ("arange", "ones_like", "detach")]
    assert passes == [
        "baddbmm.out", "causal_softmax_dropout_forward", "bmm.out", "bmm.out", "bmm", "causal_softmax_dropout_backward",
        "baddbmm.out", "baddbmm.out",
    ]
