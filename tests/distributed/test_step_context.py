"""What a step tells the model on every stage: a term of the loss in the middle of the model is free of the layout."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from cases import LR, make_batches, make_config, providers_of, release_deepspeed
from pool import RankPool

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.model.layers import TransformerLayer
from megatron_port.core.model.loss import StageLoss
from megatron_port.run.build import build_engine

COEFFICIENT = 0.3


class _Term(torch.autograd.Function):
    """Add COEFFICIENT · sum(x²) to the sum of token losses, and hand x on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad + (2 * COEFFICIENT * ctx.factor) * x, None


class _TermModel:
    """Adds the term to what the first layer makes, which is on the first stage, and reports it."""

    def __init__(self, engine: Any) -> None:
        self.slot, self.told = engine.step_slot, set[tuple[float, float]]()
        for module in engine.stage.modules():
            if isinstance(module, TransformerLayer):
                module.get_submodule("mlp.down").register_forward_hook(self._hook(module.name == "layers.0"))

    def _hook(self, first: bool) -> Any:
        def hook(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
            now = self.slot.current
            self.told.add((now.global_tokens, now.loss_factor))
            if not first:
                return None
            now.add_auxiliary("square", COEFFICIENT * output.detach().double().square().sum())
            now.add_auxiliary("samples", torch.tensor(float(len(now.sample_ids))))
            result: torch.Tensor = _Term.apply(output, now.loss_factor)
            return result

        return hook


@mock.patch.object(StageLoss, "sums", ("square", "samples"))
def _steps(config: RunConfig, topology: Topology) -> list[dict[str, Any]]:
    """Two steps and an evaluation with the term; the function that ranks are sent."""
    if config.engine == "deepspeed":
        from deepspeed.accelerator import get_accelerator

        type(get_accelerator()).is_fp16_supported = lambda self: True  # on a CPU it refuses
    ctx = ParallelContext.create(topology, "cpu") if topology.world_size > 1 else ParallelContext.single()
    engine: Any = None
    try:
        engine = build_engine(config, ctx, providers_of(config))
        term, batches, out = _TermModel(engine), make_batches(config, ctx), []
        for step in range(2):
            term.told.clear()
            r = engine.train_step(batches(step), step=step, lr=LR)
            ((tokens, factor),) = term.told
            out.append({"norm": r.grad_norm, "tokens": r.tokens, "told": tokens, "scaled": factor * max(tokens, 1.0),
                        "scale": r.loss_scale, **r.auxiliary})
            before = engine.sums.auxiliary.values.tolist()
            engine.eval_step(batches(step))
            assert engine.sums.auxiliary.values.tolist() in (before, [0.0, 0.0]), "an evaluation added"
        return out
    finally:
        if topology.world_size > 1:
            ctx.close()
            if config.engine == "deepspeed":
                release_deepspeed(engine)


@pytest.mark.parametrize(
    ("engine", "dtype", "recompute", "bound"),
    [("native", "fp64", "full", 1e-12), ("native", "fp64", "none", 1e-12), ("deepspeed", "fp32", "full", 1e-5)],
)
def test_a_term_on_the_first_stage_counts_as_on_one_process(
    ranks: RankPool, engine: str, dtype: str, recompute: str, bound: float
) -> None:
    """Labels are masked, so that the first stages know the count only from the last."""
    config = make_config(engine=engine, dtype=dtype, mask_loss=True, layout={"recompute": recompute})
    alone = _steps(make_config(dtype=dtype, mask_loss=True), Topology())
    assert alone[0]["samples"] == 8 and 0 < alone[0]["tokens"] < 8 * 16 and alone[0]["square"] > 0
    for rank in ranks.run(4, _steps, config, Topology(tp=1, pp=2, dp=2), deepspeed=engine == "deepspeed"):
        for ours, theirs in zip(rank, alone, strict=True):
            assert ours["tokens"] == ours["told"] == theirs["tokens"] and ours["samples"] == theirs["samples"]
            assert ours["scaled"] == pytest.approx(ours["scale"], rel=1e-15)
            assert math.isclose(ours["norm"], theirs["norm"], rel_tol=bound)
            assert math.isclose(ours["square"], theirs["square"], rel_tol=bound)


def test_tensor_parallel_ranks_count_once(ranks: RankPool) -> None:
    config = make_config(dtype="fp64", mask_loss=True)
    alone = _steps(config, Topology())
    for rank in ranks.run(2, _steps, config, Topology(tp=2)):
        for ours, theirs in zip(rank, alone, strict=True):
            assert ours["samples"] == theirs["samples"]
            assert math.isclose(ours["norm"], theirs["norm"], rel_tol=1e-12)
            assert math.isclose(ours["square"], theirs["square"], rel_tol=1e-5)


@pytest.mark.parametrize("engine", ["native", "deepspeed"])
def test_the_loss_factor_carries_the_loss_scale(ranks: RankPool, engine: str) -> None:
    """DeepSpeed scales the loss itself: what a module is told includes that."""
    config = make_config(engine=engine, dtype="fp16", mask_loss=True)
    for rank in ranks.run(2, _steps, config, Topology(pp=2), deepspeed=engine == "deepspeed"):
        assert rank[0]["scale"] == 1024.0
        for ours in rank:
            assert ours["scaled"] == pytest.approx(ours["scale"], rel=1e-15)
