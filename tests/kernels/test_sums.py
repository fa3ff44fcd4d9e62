"""Every sum of the CPU's kernels, as exact as torch's at any length and with vectors of any width.

A sum in one accumulator per lane is not: with 30,000 numbers its error is twice torch's with AVX2, four times with SSE.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from reference import DTYPES, assert_accurate, compare
from torch import Tensor

from megatron_port.core.io.variables import CPU_LEVEL
from megatron_port.core.layers.attention import math_attention
from megatron_port.core.layers.cross_entropy import vocab_parallel_cross_entropy
from megatron_port.core.layers.fused import torch_bias_gelu, torch_causal_softmax
from megatron_port.ext.kernels import kernels
from megatron_port.ext.kernels.ops import (
    activation,
    attention,
    norm,
    optimizer,
)
from megatron_port.ext.kernels.ops import (
    experts as expert_rows,
)
from megatron_port.ext.kernels.ops import (
    norm as dropout,
)
from megatron_port.ext.kernels.ops import (
    optimizer as table_rows,
)
from megatron_port.ext.kernels.ops.softmax import causal_softmax, own_cross_entropy

LENGTHS = (1, 2, 17, 129, 1000, 4099, 30_000, 100_000)
CPU = torch.device("cpu")
Function = Callable[..., Tensor]


@pytest.fixture(params=["v2", "v3", "v4"])
def level(request: pytest.FixtureRequest, own: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A level of the instruction set, whose library is loaded."""
    monkeypatch.setenv(CPU_LEVEL, request.param)
    if problem := kernels.kernels_status("cpu", own)[1]:
        pytest.skip(problem)
    kernels.load("cpu", folder=own)
    monkeypatch.undo()
    request.addfinalizer(lambda: kernels.load("cpu", folder=own))
    return str(request.param)


def _normal(*shape: int) -> Tensor:
    """Numbers whose sums and squares grow, so that what is lost at each addition does too."""
    g = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=g, dtype=torch.float64) * 2 + 0.5


def _pair(*shape: int) -> tuple[Tensor, Tensor]:
    """Keys and values."""
    both = _normal(2, *shape)
    return both[0], both[1]


def _samples(n: int) -> int:
    """Return how many sums of n numbers show the largest error."""
    return max(3, 1000 // n)


def _loss(x: Tensor) -> Tensor:
    labels = torch.arange(len(x)) % x.shape[1]
    return vocab_parallel_cross_entropy(
        x, labels, offset=0, extent=x.shape[1], group=None, ops=own_cross_entropy
    )


def _plain_loss(x: Tensor) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    return F.cross_entropy(wide, torch.arange(len(x)) % x.shape[1], reduction="none")


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention.attention(q, k, v, causal=False)


def _plain_attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return math_attention(q, k, v, causal=False)


def _drop(x: Tensor, bias: Tensor) -> Tensor:
    keys = torch.zeros(1, dtype=torch.int64)
    return dropout.bias_dropout_add(x, bias, torch.zeros_like(x), keys, op_key=1, p=0.0, seq_offset=0, width=x.shape[2],
                                    width_offset=0)


@dataclass(frozen=True)
class Case:
    """An own op, the same in torch, and inputs where the op adds n numbers."""

    own: Function
    eager: Function
    inputs: Callable[[int], tuple[Tensor, ...]]
    gradient_factor: float = 2.0
    """How many times torch's error gradients may have. Attention makes its probabilities again: three, as elsewhere."""
    least: int = 1
    """Numbers below which another error rules: a norm of two that are nearly alike, the gradient of the only score."""


CASES = {
    "layer norm": Case(lambda x, w, b: norm.layer_norm(x, w, b, 1e-5), lambda x, w, b: F.layer_norm(x, w.shape, w, b),
                       lambda n: (_normal(_samples(n), n), *_pair(n)), least=17),
    "rms norm": Case(lambda x, w: norm.rms_norm(x, w, 1e-5), lambda x, w: F.rms_norm(x, w.shape, w, 1e-5),
                     lambda n: (_normal(_samples(n), n), _normal(n)), least=17),
    "rows of layer norm": Case(
        lambda x, w, b: norm.layer_norm(x, w, b, 1e-5), lambda x, w, b: F.layer_norm(x, w.shape, w, b),
        lambda n: (_normal(n, _samples(n) + 20), *_pair(_samples(n) + 20))),
    "rows of rms norm": Case(lambda x, w: norm.rms_norm(x, w, 1e-5), lambda x, w: F.rms_norm(x, w.shape, w, 1e-5),
                             lambda n: (_normal(n, _samples(n)), _normal(_samples(n)))),
    "softmax": Case(lambda x: causal_softmax(x, scale=0.3), lambda x: torch_causal_softmax(x, scale=0.3),
                    lambda n: (_normal(_samples(n), 1, 1, n),)),
    "cross entropy": Case(_loss, _plain_loss, lambda n: (_normal(_samples(n), n),)),
    "rows of gelu": Case(
        lambda x, b: activation.bias_gelu(x, b, approximate=True), lambda x, b: torch_bias_gelu(x, b, approximate=True),
        lambda n: (_normal(n, _samples(n)), _normal(_samples(n)))),
    "rows of dropout": Case(_drop, lambda x, b: x + b, lambda n: (_normal(n, 1, _samples(n)), _normal(_samples(n)))),
    "keys of attention": Case(_attend, _plain_attend,
                              lambda n: (_normal(8, _samples(n), 1, 8), *_pair(n, _samples(n), 1, 8)),
                              gradient_factor=3.0, least=2),
    "queries of attention": Case(_attend, _plain_attend,
                                 lambda n: (_normal(n, _samples(n), 1, 8), *_pair(3, _samples(n), 1, 8)),
                                 gradient_factor=3.0),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(level: str, name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    for n in [n for n in LENGTHS if n >= case.least] if dtype == torch.float32 else LENGTHS[-1:]:
        compare(case.own, case.eager, case.inputs(n), dtype, CPU, gradient_factor=case.gradient_factor,
                what=f"{level}: {name} of {n}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_without_gradients(level: str, dtype: torch.dtype) -> None:
    """Squared norms, inner products of experts' rows, rows of a table that one token names."""
    for n in LENGTHS:
        x, y = (t.to(dtype) for t in _pair(_samples(n), n))
        exact = x.double().square().sum()
        assert_accurate(optimizer.square_norm([x]).float(), x.float().square().sum(), exact, factor=2.0,
                        what=f"{level}: squared norm of {n}")
        place, weight = torch.arange(len(x)).view(-1, 1), torch.ones(len(x), 1)
        found = expert_rows.sum_rows_backward(x, y, place, weight)[1]
        plain = (x.float() * y.float()).sum(1, keepdim=True)
        assert_accurate(found, plain, (x.double() * y.double()).sum(1, keepdim=True), factor=2.0,
                        what=f"{level}: inner product of {n}")
        rows, total = x.t().contiguous(), torch.zeros(1, len(x))
        table_rows.add_rows_(total, torch.zeros(n, dtype=torch.int64), rows)
        assert_accurate(total, rows.float().sum(0, keepdim=True), rows.double().sum(0, keepdim=True), factor=2.0,
                        what=f"{level}: {n} rows of one token")
