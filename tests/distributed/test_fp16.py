"""fp16 with dynamic loss scaling: either engine and one process skip the same steps and agree between them.

DeepSpeed refuses fp16 on a CPU, so its CPU accelerator is told here that it can; the arithmetic is real.
"""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
from cases import LR, make_batches, make_config, single_run, within_rounding
from pool import RankPool

from megatron_port.core.config.features import FineTuningConfig
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.layers import linear as linear_kernels
from megatron_port.core.layers.providers import torch_providers
from megatron_port.run.build import build_engine
from megatron_port.tools.parity.comparison import Run
from megatron_port.tools.parity.run_record import RankTrace, record_run

STEPS = 12
Steps = tuple[float, float | None, bool, float]
"""(loss, grad norm, skipped, loss scale)"""


def _config(
    engine: str, *, scale: float = 1024.0, window: int = 1000, num_layers: int = 3, dtype: str = "fp16",
    **layout: object,
) -> RunConfig:
    config = make_config(
        engine=engine, dtype=dtype, model={"tie_embeddings": True, "hidden_dropout": 0.1, "num_layers": num_layers},
        layout=dict(layout),
    )
    precision = dataclasses.replace(
        config.precision, initial_loss_scale=scale, loss_scale_window=window, loss_scale_hysteresis=1
    )
    return dataclasses.replace(config, precision=precision)


def _allow_fp16_on_cpu() -> None:
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda self: True


def _steps(
    config: RunConfig, topology: Topology, steps: int, rounded: bool = False, lr: float = LR
) -> list[Steps]:
    """Of each step. ``rounded``: each parameter's gradient is made in fp16 first.

    That is what DeepSpeed does, and there it overflows at 65504. The native engine's goes straight to fp32.
    """
    if config.engine == "deepspeed":
        _allow_fp16_on_cpu()
    layout = config.layout
    ctx = ParallelContext.create(
        dataclasses.replace(topology, vp=layout.virtual_pipeline_size, folded=layout.pipeline_schedule == "zb-v"), "cpu"
    )
    engine = build_engine(config, ctx, torch_providers())
    for parameter in engine.stage.parameters() if rounded else ():  # type: ignore[attr-defined]
        parameter.grad_dtype = parameter.dtype
    batches = make_batches(config, ctx)
    out = []
    product = linear_kernels.add_product
    in_fp16 = mock.patch.object(
        linear_kernels, "add_product",
        lambda total, a, b, first=False: (
            (total.copy_ if first else total.add_)(a.t().mm(b)) if rounded else product(total, a, b, first=first)
        ),
    )
    with in_fp16:
        for step in range(steps):
            r = engine.train_step(batches(step), step=step, lr=lr)
            out.append((r.loss, r.grad_norm, r.skipped, r.loss_scale))
    ctx.close()
    return out


def _all_steps(configs: list[RunConfig], topology: Topology, steps: int) -> list[list[Steps]]:
    return [_steps(config, topology, steps) for config in configs]


def _record(config: RunConfig, topology: Topology) -> RankTrace:
    _allow_fp16_on_cpu()
    ctx = ParallelContext.create(topology, "cpu")
    engine = build_engine(config, ctx, torch_providers())
    return record_run(engine, ctx, make_batches(config, ctx), steps=3, lr=lambda step: LR)


@pytest.mark.parametrize("engine,layout", [("native", (2, 2, 1)),
    pytest.param("deepspeed", (1, 2, 2), marks=pytest.mark.slow), ("deepspeed", (2, 2, 1)),
])
def test_the_same_steps_are_skipped(ranks: RankPool, engine: str, layout: tuple[int, int, int]) -> None:
    """From a scale that overflows: halved until it fits, doubled again after every window."""
    scale, window = 2.0**22, 4
    rounded = engine == "deepspeed"
    reference = _steps(_config("native", scale=scale, window=window), Topology(), STEPS, rounded)
    tp, pp, dp = layout
    config = _config(engine, scale=scale, window=window, pipeline_schedule="1f1b")
    results = ranks.run(tp * pp * dp, _steps, config, Topology(tp, pp, dp), STEPS, deepspeed=engine == "deepspeed")
    for steps in results:
        _same(steps, reference)


def test_the_micro_batch_does_not_decide_which_steps_are_skipped_with_adapters() -> None:
    """Sums over a micro-batch's tokens are wide, so that it is the same step however its samples are divided."""
    found = []
    for size in (1, 8):
        config = _config("native", scale=2.0**22, window=4, num_layers=1)
        config = dataclasses.replace(
            config, fine_tuning=FineTuningConfig(method="lora", rank=3),
            batch=dataclasses.replace(config.batch, micro_batch_size=size),
        )
        found.append(_steps(config, Topology(), STEPS))
    assert {skipped for _, _, skipped, _ in found[0]} == {False, True}
    _same(found[0], found[1])


SCHEDULES = [("gpipe", 1, 1), ("1f1b", 2, 1), ("zb-h1", 1, 1), ("zb-v", 2, 1), ("1f1b", 1, 2)]
"""(name, chunks, ZeRO stage)"""


def test_every_schedule_skips_the_same_steps(ranks: RankPool) -> None:
    settings: dict[str, Any] = {"scale": 2.0**22, "window": 4, "num_layers": 4}
    reference = _steps(_config("native", **settings), Topology(), STEPS)
    configs = [
        _config("native", **settings, pipeline_schedule=name, virtual_pipeline_size=chunks, zero_stage=zero)
        for name, chunks, zero in SCHEDULES
    ]
    for found in ranks.run(4, _all_steps, configs, Topology(1, 2, 2), STEPS):
        assert len(found) == len(configs)
        for steps in found:
            _same(steps, reference)
    # Until the first step that is applied the weights are the initial ones: an fp32 run that learns nothing.
    exact = _steps(_config("native", **{**settings, "dtype": "fp32"}), Topology(), STEPS, lr=0.0)
    first = next(i for i, (_, _, skipped, _) in enumerate(reference) if not skipped)
    assert first > 0
    for i in range(first + 1):
        assert reference[i][0] == pytest.approx(exact[i][0], rel=2e-3)
    assert reference[first][1] == pytest.approx(exact[first][1], rel=1e-2)


def _same(steps: list[Steps], reference: list[Steps]) -> None:
    skipped = [s for _, _, s, _ in reference]
    assert any(skipped) and not all(skipped), "the scale was chosen so that some steps overflow"
    scales = [x for _, _, _, x in reference]
    assert any(b > a for a, b in zip(scales, scales[1:])), "and that it grows again"
    assert [s for _, _, s, _ in steps] == skipped
    assert [x for _, _, _, x in steps] == scales
    for ours, theirs in zip(steps, reference):
        assert ours[0] == pytest.approx(theirs[0], rel=5e-3)
        if theirs[1] is not None:
            # A gradient divided by the scale of the next step would be off by a factor of two.
            assert ours[1] == pytest.approx(theirs[1], rel=2e-2)


def test_tied_gradients_are_summed_in_fp16(ranks: RankPool) -> None:
    """fp16, ZeRO-1, fp32 accumulation, two stages, tied: DeepSpeed by itself never sums the two gradients."""
    config = _config("deepspeed")
    topology = Topology(1, 2, 1)
    run = Run.of(ranks.run(2, _record, config, topology, deepspeed=True))
    deviations = within_rounding(config, topology, run, lambda order: single_run(config, steps=3, order=order))
    assert all(d.ok for d in deviations), "\n".join(map(str, deviations))
