"""Gradients of biases, norms, sinks and positions in half precision: summed over rows and micro-batches without being
rounded to the parameter's dtype, against sums in float64 that no code of the package makes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_port.core.config.schema import (
    BackendConfig,
    BatchConfig,
    LayoutConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
)
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.positions import Positions, Run
from megatron_port.core.dist.rank import DeviceInfo
from megatron_port.core.engine.native import NativeEngine
from megatron_port.core.engine.native_passes import GradientSink
from megatron_port.core.layers import fused
from megatron_port.core.layers.attention import visible_softmax
from megatron_port.core.layers.embedding import position_rows, table_rows
from megatron_port.core.layers.linear import PlainLinearKernels, linear
from megatron_port.core.layers.providers import Providers, torch_providers
from megatron_port.ext.kernels import kernels
from megatron_port.ext.kernels.choose import choose_providers
from megatron_port.ext.kernels.gradient_sums import SumsTogether
from megatron_port.ext.weights.shared_layers import separate_use
from megatron_port.run.build import build_engine

WIDTH, SEQ, BATCH, MICRO_BATCHES = 24, 32, 4, 64
EPS = 1e-5
HALF = (torch.bfloat16, torch.float16)
Layer = Callable[[Tensor, list[Tensor]], Tensor]
Exact = Callable[[Tensor, Tensor], list[Tensor]]


def _statistics(x: Tensor, rms: bool) -> Tensor:
    centred = x if rms else x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt()


def _over_rows(grad: Tensor) -> Tensor:
    return grad.flatten(0, -2).sum(0)


HALVES = Positions((Run(4, 10), Run(20, 22)))
TOKENS = torch.arange(SEQ * BATCH).view(SEQ, BATCH) % 7


def _lookup(x: Tensor, grad: Tensor) -> list[Tensor]:
    return [torch.zeros(SEQ + 10, WIDTH, dtype=torch.float64).index_put_((TOKENS,), grad, accumulate=True)]


def _at(rows: list[int], grad: Tensor) -> Tensor:
    out = torch.zeros(SEQ + 10, WIDTH, dtype=torch.float64)
    out[rows] = grad.sum(1)
    return out


def _table(x: Tensor, p: list[Tensor]) -> Tensor:
    return x + table_rows(TOKENS, p[0])


CASES: dict[str, tuple[Layer, Exact, list[tuple[int, ...]]]] = {
    "linear": (lambda x, p: linear(x, torch.eye(WIDTH, dtype=x.dtype), p[0], kernels=PlainLinearKernels()),
               lambda x, g: [_over_rows(g)], [(WIDTH,)]),
    "bias": (lambda x, p: fused.add_bias(x, p[0]), lambda x, g: [_over_rows(g)], [(WIDTH,)]),
    "layer norm": (lambda x, p: fused.torch_layer_norm(x, None, p[0], p[1], EPS)[0],
                   lambda x, g: [_over_rows(g * _statistics(x, False)), _over_rows(g)], [(WIDTH,)] * 2),
    "rms norm": (lambda x, p: fused.torch_rms_norm(x, None, p[0], None, EPS)[0],
                 lambda x, g: [_over_rows(g * _statistics(x, True))], [(WIDTH,)]),
    "all positions": (lambda x, p: x + position_rows(p[0], Positions.contiguous(SEQ), BATCH),
                      lambda x, g: [g.sum(1)], [(SEQ, WIDTH)]),
    "some positions": (lambda x, p: x + position_rows(p[0], HALVES, BATCH),
                       lambda x, g: [_at([*range(4, 14), *range(20, 42)], g)], [(SEQ + 10, WIDTH)]),
    "positions of documents": (_table, _lookup, [(SEQ + 10, WIDTH)]),
}


class Sums:
    """fp32 sums in the place of ``ShardedParameters``, in one bucket."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.sums = {id(p): torch.zeros(p.shape) for p in parameters}

    def reduced_with(self, parameter: Tensor) -> int:
        return 0

    def gradient_of(self, parameter: Tensor) -> Tensor:
        return self.sums[id(parameter)]

    def uninitialized_gradient_of(self, parameter: Tensor) -> Tensor | None:
        return None

    def added(self, parameter: Tensor) -> None: ...


def _errors(name: str, dtype: torch.dtype, own_sums: bool, *, free: bool = True) -> list[float]:
    """Relative error of each parameter's gradient, summed over micro-batches. ``free``: of any dtype, as an engine
    takes it."""
    layer, exact, shapes = CASES[name]
    draw = torch.Generator().manual_seed(3)
    parameters = [torch.randn(s, generator=draw).to(dtype).requires_grad_() for s in shapes]
    sums: Any = Sums(parameters)
    sink: GradientSink = SumsTogether(sums) if own_sums else GradientSink(sums)
    for p in parameters:
        if free:
            p.grad_dtype = None
        p.register_post_accumulate_grad_hook(sink.hook(p))
    wanted = [torch.zeros(s, dtype=torch.float64) for s in shapes]
    for _ in range(MICRO_BATCHES):
        x, grad = (torch.randn(SEQ, BATCH, WIDTH, generator=draw).to(dtype) for _ in range(2))
        layer(x.clone().requires_grad_(), parameters).backward(grad)
        sink.flush()
        for total, part in zip(wanted, exact(x.double(), grad.double()), strict=True):
            total += part
    return [float((sums.sums[id(p)] - w).norm() / w.norm()) for p, w in zip(parameters, wanted, strict=True)]


@pytest.mark.parametrize("own_sums", [False, True], ids=["torch", "together"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_sums_over_micro_batches_are_exact(name: str, dtype: torch.dtype, own_sums: bool) -> None:
    """2e-6 is some 20 roundings of fp32; one of bf16 a micro-batch leaves 2e-3, of fp16 2e-4 (below)."""
    if own_sums and (problem := kernels.kernels_status("cpu")[1]):
        pytest.skip(problem)
    kernels.load("cpu")
    assert max(_errors(name, dtype, own_sums)) < 2e-6


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_parameters_of_one_dtype_are_rounded(dtype: torch.dtype) -> None:
    """As autograd does for an engine that takes all gradients from it; and the test above can tell."""
    for name in CASES:
        if name != "positions of documents":  # 5 tokens a row: fewer roundings
            assert min(_errors(name, dtype, False, free=False)) > torch.finfo(dtype).eps / 8, name


def test_attention_sinks_are_summed_in_fp32() -> None:
    sinks = torch.randn(2, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    sinks.grad_dtype = None
    scores = torch.randn(1, 2, SEQ, SEQ, generator=torch.Generator().manual_seed(2)).bfloat16()
    hidden = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
    grad = torch.randn(scores.shape, generator=torch.Generator().manual_seed(4)).bfloat16()
    visible_softmax(scores.requires_grad_(), ~hidden, sinks=sinks).backward(grad)
    exact = sinks.detach().double().requires_grad_()
    wide = torch.cat((scores.double().masked_fill(hidden, -math.inf), exact.view(1, 2, 1, 1).expand(1, 2, SEQ, 1)), -1)
    wide.softmax(-1)[..., :-1].backward(grad.double())
    assert sinks.grad is not None and exact.grad is not None and sinks.grad.dtype == torch.float32
    assert (sinks.grad - exact.grad).norm() < 1e-5 * exact.grad.norm()


def test_separate_uses_of_a_parameter_are_not_rounded() -> None:
    parameter = torch.zeros(WIDTH, dtype=torch.bfloat16, requires_grad=True)
    parameter.grad_dtype = None
    found: list[Tensor] = []
    grads = [torch.randn(SEQ, BATCH, WIDTH, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(2)]
    for grad in grads:
        use = separate_use(parameter, found.append)
        fused.add_bias(torch.zeros_like(grad).requires_grad_(), use).backward(grad)
        assert use.grad is None and parameter.grad is None and use.data_ptr() == parameter.data_ptr()
    for grad, total in zip(grads, found, strict=True):
        assert total.dtype == torch.float32 and torch.allclose(total.double(), _over_rows(grad.double()), atol=1e-5)


# What an engine is handed, by every provider.

MODELS: dict[str, dict[str, Any]] = {
    "gpt": {}, "untied, with biases everywhere": {
        "position_embedding": "rope", "normalization": "rmsnorm", "qk_norm": True, "num_query_groups": 1,
        "tie_embeddings": False, "head_bias": True},
    "gated": {"activation": "swiglu", "add_bias": False, "qkv_bias": True, "position_embedding": "rope"},
}


def _engine(model: dict[str, Any], *, own: bool) -> NativeEngine:
    config = RunConfig(
        engine="native", model=ModelConfig(
            num_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=31, seq_length=8, **model),
        layout=LayoutConfig(vocab_padding_multiple=1), batch=BatchConfig(micro_batch_size=2, global_batch_size=4),
        precision=PrecisionConfig(dtype="bf16"), optimizer=OptimizerConfig(lr=1e-2),
        backend=BackendConfig(device="cpu"),
    )
    ctx = ParallelContext.single()
    providers: Providers = torch_providers()
    if own:
        device = DeviceInfo("cpu", torch.device("cpu"), "gloo", "none", 0, "test")
        providers = choose_providers(config.backend, device, torch.bfloat16)
    else:
        config = replace(config, backend=replace(config.backend, attention="math", own_kernels="off"))
    engine = build_engine(config, ctx, providers)
    assert isinstance(engine, NativeEngine)
    return engine


@pytest.mark.parametrize("own", [False, True], ids=["torch", "own"])
@pytest.mark.parametrize("model", MODELS)
def test_no_gradient_that_an_engine_is_handed_was_rounded(model: str, own: bool) -> None:
    if own and (problem := kernels.kernels_status("cpu")[1]):
        pytest.skip(problem)
    engine = _engine(MODELS[model], own=own)
    found: dict[str, torch.dtype] = {}

    def look(name: str, grad: Tensor | None) -> None:
        if grad is not None:  # else it bypasses autograd
            found[name] = grad.dtype

    for record, p in engine.parameters:
        p.register_hook(partial(look, record.name))
    tokens = torch.randint(0, 31, (4, 9), generator=torch.Generator().manual_seed(1))
    pairs = [MicroBatch((i, i + 1), tokens=t[:, :-1], labels=t[:, 1:]) for i, t in zip((0, 2), tokens.split(2))]
    result = engine.train_step(pairs, step=0, lr=1e-2)
    assert result.grad_norm is not None and result.grad_norm > 0
    assert not [name for name, dtype in found.items() if dtype != torch.float32], found
