"""Parts of the native engine that one process shows: memory that ends, products that are deferred, steps that count."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_port.backend.providers import torch_providers
from megatron_port.config.schema import (
    BackendConfig,
    BatchConfig,
    LayoutConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
)
from megatron_port.engine.api import MicroBatch
from megatron_port.engine.native import NativeEngine
from megatron_port.parallel.context import ParallelContext
from megatron_port.parallel.linear import WeightGradients, linear
from megatron_port.train.assemble import build_engine


def make_engine(schedule: str = "1f1b", chunks: int = 1, **layout: Any) -> NativeEngine:
    config = RunConfig(
        engine="native",
        model=ModelConfig(num_layers=4, hidden_size=16, num_attention_heads=2, vocab_size=31, seq_length=8),
        layout=LayoutConfig(
            vocab_padding_multiple=1, pipeline_schedule=schedule, virtual_pipeline_size=chunks, **layout
        ),
        batch=BatchConfig(micro_batch_size=1, global_batch_size=3), precision=PrecisionConfig(dtype="fp64"),
        optimizer=OptimizerConfig(lr=1e-2), backend=BackendConfig(device="cpu", attention="math", own_kernels="off"),
    )
    ctx = ParallelContext.single()
    if chunks > 1:
        ctx = replace(ctx, topology=replace(ctx.topology, vp=chunks, folded=schedule == "zb-v"))
    engine = build_engine(config, ctx, torch_providers())
    assert isinstance(engine, NativeEngine)
    return engine


def batches(count: int = 3) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 31, (count, 1, 9), generator=generator)
    return [MicroBatch((i,), tokens=t[:, :-1], labels=t[:, 1:]) for i, t in enumerate(tokens)]


def test_an_engine_ends_with_its_last_reference() -> None:
    """A circle through autograd's hooks would keep process groups and their polling threads until some collection."""
    make_engine()  # torch's first optimizer imports things that keep frames
    gc.collect()
    gc.disable()
    try:
        engine = make_engine()
        engine.train_step(batches(), step=0, lr=1e-2)
        ends = [weakref.ref(x) for x in (engine, engine.sharded, engine.stage, next(engine.stage.parameters()))]
        del engine
        assert [end() for end in ends] == [None] * 4
    finally:
        gc.enable()


@pytest.mark.parametrize("schedule,chunks", [("1f1b", 2), ("zb-h1", 1), ("zb-v", 2)])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_schedule_changes_nothing_on_one_stage(schedule: str, chunks: int, recompute: str) -> None:
    """Loss, norm and weights are those of 1F1B within fp64's rounding."""
    plain, other = make_engine(), make_engine(schedule, chunks, recompute=recompute)
    for step in range(3):
        a, b = (e.train_step(batches(), step=step, lr=1e-2) for e in (plain, other))
        assert a.loss == pytest.approx(b.loss, rel=1e-12) and a.grad_norm == pytest.approx(b.grad_norm, rel=1e-12)
    ours = {r.name: p for r, p in other.named_parameters()}
    for record, p in plain.named_parameters():
        torch.testing.assert_close(ours[record.name], p, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_zero_bubble_computes_no_weight_gradient_in_the_input_pass(recompute: str) -> None:
    """4 layers of 4 linears and the head: one product each a micro-batch, all of them in WEIGHT passes."""
    engine = make_engine("zb-h1", recompute=recompute)
    seen: list[tuple[str, int]] = []
    real = engine.runner.run

    def watching(schedule, worker, shape_of):  # type: ignore[no-untyped-def]
        inner = worker.run

        def run(action, received):  # type: ignore[no-untyped-def]
            before = engine.weight_gradients.products
            result = inner(action, received)
            seen.append((action.kind.value, engine.weight_gradients.products - before))
            return result

        worker.run = run
        real(schedule, worker, shape_of)

    engine.runner.run = watching  # type: ignore[method-assign]
    engine.train_step(batches(), step=0, lr=1e-2)
    assert {n for kind, n in seen if kind in "FI"} == {0}
    assert [n for kind, n in seen if kind == "W"] == [4 * 4 + 1] * 3


def test_products_wait_while_they_are_held() -> None:
    told: list[torch.Tensor] = []
    gradients = WeightGradients(told.append)
    weight = torch.nn.Parameter(torch.randn(3, 5))
    weight.main_grad = torch.zeros(3, 5)  # type: ignore[attr-defined]
    weight.weight_gradients = gradients  # type: ignore[attr-defined]
    x = torch.randn(4, 5, requires_grad=True)
    held = gradients.holding = []
    linear(x, weight).sum().backward()
    assert x.grad is not None and len(held) == 1 and not told
    assert not weight.main_grad.any()  # type: ignore[attr-defined]
    gradients.holding = None
    gradients.run(held)
    torch.testing.assert_close(weight.main_grad, torch.ones(4, 3).t() @ x.detach())  # type: ignore[attr-defined]
    assert told == [weight] and not held and gradients.products == 1
