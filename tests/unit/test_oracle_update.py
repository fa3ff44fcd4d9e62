"""Clipping, averaged weights and narrow moments, against torch and numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_narrow_adamw import piece_of, record_of

from megatron_port.core.config.schema import ModelConfig, OptimizerConfig, ParameterGroup, RunConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.record import InitSpec, ParameterRecord, attach, make_record
from megatron_port.core.dist.record import record_of as record_of_parameter
from megatron_port.core.engine.native_update import make_update
from megatron_port.core.optim.gradients import clip_factor, limited, norm_target
from megatron_port.core.optim.rules import (
    BlockRule,
    StepNumbers,
    StepValues,
    UpdateSettings,
    rule_of,
    settings_in,
)
from megatron_port.core.optim.sharded import ShardedParameters, ShardSettings
from megatron_port.ext.kernels.narrow_adamw import ADAMW_8BIT, ADAMW_BF16
from megatron_port.ext.rules.adaptive_clipping import AdaptiveClipping
from megatron_port.ext.rules.groups import set_parameter_groups
from megatron_port.ext.weights.masks import WeightAverage

CPU = torch.device("cpu")
FAR = 1e300


def values_of(**numbers: float) -> StepValues:
    values = StepValues(CPU)
    values.set(StepNumbers(**numbers))
    return values


def sharded_of(config: OptimizerConfig, *values: torch.Tensor) -> ShardedParameters:
    """Masters of these values, none of which decays."""
    pairs = []
    for number, value in enumerate(values):
        record = make_record(
            f"layers.{number}.mlp.down.bias", tuple(value.shape), ParallelContext.single(), init=InitSpec("zeros"),
            decay=False,
        )
        pairs.append((record, attach(torch.nn.Parameter(value.clone()), record)))
    sharded = ShardedParameters(
        [[pairs]], ParallelContext.single(), ShardSettings(master_dtype=torch.float64, split_state=False, capacity=200),
        rule=rule_of(config),
    )
    for piece in sharded.pieces:
        piece.master.copy_(piece.weight)
    return sharded


def number_of(record: ParameterRecord) -> int:
    return int(record.name.split(".")[1])


# ------------------------------------------------------------------------------------------------ clipping


def torchs_clipping(gradients: list[torch.Tensor], largest: float) -> tuple[float, list[torch.Tensor]]:
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for p, g in zip(parameters, gradients):
        p.grad = g.clone()
    norm = torch.nn.utils.clip_grad_norm_(parameters, largest)
    return float(norm), [p.grad for p in parameters]  # type: ignore[misc]


@pytest.mark.parametrize("size", [1e-6, 3e-5, 1.0, 40.0])
@pytest.mark.parametrize("share", [0.3, 0.9, 1.5])
@pytest.mark.parametrize("scale", [1.0, 256.0])
def test_clipping_by_norm_is_torchs(size: float, share: float, scale: float) -> None:
    """On the host and on the device, with the 1e-6 that is added to the norm, and a loss scale in the gradients."""
    generator = torch.Generator().manual_seed(0)
    true = [size * torch.randn(n, generator=generator, dtype=torch.float64) for n in (5, 30)]
    exact = math.sqrt(sum(float((g.numpy() ** 2).sum()) for g in true))
    largest = share * exact
    norm, wanted = torchs_clipping(true, largest)
    square = sum((g * scale).square().sum() for g in true)
    assert isinstance(square, torch.Tensor)
    factor, skip, found = clip_factor(square, max_norm=largest, inv_scale=1.0 / scale)
    assert float(skip) == 0.0 and float(found) == pytest.approx(norm, rel=1e-12)
    for g, w in zip(true, wanted):
        torch.testing.assert_close(g * scale * float(factor), w, rtol=3e-7, atol=0)

    config = OptimizerConfig(name="sgd", clip_grad=largest)
    sharded = sharded_of(config, *(torch.zeros_like(g) for g in true))
    for piece in sharded.pieces:
        piece.gradient.copy_(true[number_of(piece.record)] * scale)
    reported, _ = make_update("torch", sharded, config).step(
        square, values_of(lr=1.0, scale=scale), skip=torch.zeros(()))
    assert float(reported) == pytest.approx(norm, rel=1e-12)
    for piece in sharded.pieces:  # the first momentum is the gradient
        torch.testing.assert_close(-piece.master, wanted[number_of(piece.record)], rtol=1e-12, atol=0)


def test_no_clipping_without_a_limit() -> None:
    factor, skip, norm = clip_factor(torch.tensor(2.0**40), max_norm=0.0, inv_scale=0.5)
    assert (float(factor), float(skip), float(norm)) == (0.5, 0.0, 2.0**19)


@pytest.mark.parametrize(("square", "limit", "skip", "skips"), [
    (4.0, 2.0, 0.0, False), (4.0, math.nextafter(2.0, 0.0), 0.0, True), (math.inf, FAR, 0.0, True),
    (math.nan, FAR, 0.0, True), (4.0, FAR, 1.0, True), (4.0, FAR, 0.0, False),
])
def test_which_updates_are_skipped(square: float, limit: float, skip: float, skips: bool) -> None:
    """A norm at its limit is not, neither on the device nor on the host."""
    given = torch.tensor(square, dtype=torch.float64)
    _, skipped, _ = clip_factor(given, max_norm=1.0, inv_scale=1.0, limit=limit, skip=torch.tensor(skip))
    assert bool(skipped) is skips
    config = OptimizerConfig(name="sgd")
    sharded = sharded_of(config, torch.zeros(3, dtype=torch.float64))
    sharded.pieces[0].gradient.fill_(1.0)
    _, refused = make_update("torch", sharded, config).step(
        given, values_of(lr=1.0, largest_norm=limit), skip=torch.tensor(skip))
    assert bool(refused) is skips and bool(sharded.pieces[0].master.any()) is not skips


@settings(max_examples=80, deadline=None)
@given(st.floats(0.0, 9.0), st.floats(0.1, 3.0), st.floats(0.01, 2.0), st.floats(0.5, 4.0), st.floats(0.0, 5.0))
def test_adaptive_clipping_is_the_papers_on_host_and_device(
    norm: float, mean: float, deviation: float, threshold: float, largest: float
) -> None:
    """arXiv 2504.02507, equation 5: mean + threshold² / z · deviation above, then the fixed limit."""
    z = (norm - mean) / deviation
    wanted = mean + threshold**2 / z * deviation if z > threshold else norm
    assert limited(norm, mean, deviation, threshold) == pytest.approx(wanted, rel=1e-12)
    config = OptimizerConfig(clip_zscore=threshold, clip_grad=largest)
    values = values_of(norm_mean=mean, norm_deviation=deviation)
    target = norm_target(config, values)
    assert target is not None
    found = target(torch.tensor(norm, dtype=torch.float64))
    assert float(found) == pytest.approx(wanted, rel=1e-12)
    factor, _, _ = clip_factor(
        torch.tensor(norm, dtype=torch.float64).square(), max_norm=largest, inv_scale=1.0, target=target)
    bound = min(wanted, largest) if largest else wanted
    if abs(bound - norm) > 1e-9:  # next to it the 1e-6 decides
        assert float(factor) == pytest.approx(bound / (norm + 1e-6) if bound < norm else 1.0, rel=1e-6)


def test_statistics_of_norms_begin_with_all_of_the_warm_up() -> None:
    """Population mean and variance of exactly clip_warmup norms; nothing is clipped before."""
    statistics = AdaptiveClipping(OptimizerConfig(clip_zscore=1.0, clip_warmup=4))
    for count, norm in enumerate((1.0, 3.0, 2.0, 6.0), 1):
        assert statistics.now[1] > FAR
        statistics.account(norm)
        assert (statistics.now[1] > FAR) is (count < 4)
    assert statistics.now == pytest.approx((3.0, math.sqrt(3.5)))


# ------------------------------------------------------------------------------------------------ averages


def test_the_average_is_torchs() -> None:
    """torch.optim.swa_utils, which begins with a copy too; a refused update is none, the first neither."""
    from torch.optim.swa_utils import get_ema_avg_fn

    average_of, generator = get_ema_avg_fn(0.7), torch.Generator().manual_seed(2)
    sharded = sharded_of(OptimizerConfig(name="sgd", ema_decay=0.7), torch.zeros(9, dtype=torch.float64))
    average, wanted = WeightAverage(sharded, 0.7), torch.zeros(9, dtype=torch.float64)
    (piece,) = sharded.pieces
    for number in range(6):
        piece.master.copy_(torch.randn(9, generator=generator, dtype=torch.float64))
        refused = number in (0, 3)
        average.update(torch.tensor(float(refused)))
        if number == 1:
            wanted = piece.master.clone()
        elif not refused:
            wanted = torch.as_tensor(average_of(wanted, piece.master, torch.tensor(number)))
        torch.testing.assert_close(piece.state["ema"], wanted, rtol=1e-14, atol=1e-15)


def test_wide_matrices_learn_slower_and_decay_as_much() -> None:
    """Tensor Programs V, table 8, m = 4, with a group's factors: (rate, decay) of each kind of parameter."""
    config = RunConfig(
        model=ModelConfig(hidden_size=64, mup_base_size=16),
        optimizer=OptimizerConfig(weight_decay=0.1, groups=(
            ParameterGroup(match="*.down.*", lr_factor=2.0), ParameterGroup(match="head", weight_decay=0.0),
        )),
    )
    names = {"layers.0.mlp.up.weight": (0.25, 0.4), "layers.0.mlp.down.weight": (0.5, 0.4), "head.weight": (1.0, 0.0),
             "embedding.word.weight": (1.0, 0.1), "layers.0.mlp.up.bias": (1.0, 0.0), "final_norm.weight": (1.0, 0.0)}
    parameters = []
    for name in names:
        record = make_record(name, (4, 4), ParallelContext.single(), init=InitSpec("zeros"),
                             decay=name.endswith(".weight") and "norm" not in name)
        parameters.append(attach(torch.nn.Parameter(torch.zeros(4, 4)), record))
    set_parameter_groups(parameters, config)
    for p, wanted in zip(parameters, names.values()):
        assert settings_in(record_of_parameter(p), 0.1) == pytest.approx(wanted)


@pytest.mark.parametrize("name", ["adamw", "adamw-bf16", "adamw-8bit", "lion", "sgd", "adagrad", "adafactor", "came",
                                  "sm3", "lamb", "muon"])
def test_every_rule_can_keep_an_average(name: str) -> None:
    record = record_of((4, 9))
    plain, averaged = (rule_of(OptimizerConfig(name=name, ema_decay=decay)) for decay in (0.0, 0.9))
    assert averaged.kinds(record) == (*plain.kinds(record), "ema") and "ema" not in plain.kinds(record)
    assert [k.name for k in averaged.state(record)] == [*(k.name for k in plain.state(record)), "ema"]


# ------------------------------------------------------------------------------------------------ narrow moments


def adamw_of(w: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray, s: UpdateSettings) -> tuple[Any, Any, Any]:
    """arXiv 1711.05101, algorithm 2, in fp64."""
    m, v = s.beta1 * m + (1 - s.beta1) * g, s.beta2 * v + (1 - s.beta2) * g * g
    unbiased, size = m / (1 - s.beta1**s.step), np.sqrt(v / (1 - s.beta2**s.step))
    return w - s.lr * s.weight_decay * w - s.lr * unbiased / (size + s.eps), m, v


def wide(state: torch.Tensor) -> np.ndarray:
    out: np.ndarray = state.double().numpy()
    return out


@pytest.mark.parametrize(("rule", "shape"), [(ADAMW_BF16, (8, 256)), (ADAMW_8BIT, (5, 9)), (ADAMW_8BIT, (4, 256))],
                         ids=["bf16", "8bit, odd rows", "8bit"])
def test_narrow_moments_update_as_adamw_does(rule: BlockRule, shape: tuple[int, int]) -> None:
    """Each update by itself, from the moments that are stored; eps is large, so that its place counts. What is stored
    is next to the new moments, and in bf16 their expectation."""
    record: ParameterRecord = record_of(shape)
    generator, n = torch.Generator().manual_seed(5), shape[0] * shape[1]
    piece = piece_of(rule, record, 0, torch.randn(n, generator=generator))
    drift = []
    for step in range(1, 5):
        s = UpdateSettings(step=step, lr=0.05, weight_decay=0.4, beta1=0.8, beta2=0.9, eps=0.3, seed=1)
        g = torch.randn(n, generator=generator)
        before = {k: stored(piece.state, k, rule, record) for k in ("exp_avg", "exp_avg_sq")}
        wanted, m, v = adamw_of(wide(piece.master), wide(g), before["exp_avg"], before["exp_avg_sq"], s)
        piece.gradient.copy_(g)
        rule.update_(piece, s)
        np.testing.assert_allclose(wide(piece.master), wanted, rtol=0, atol=1e-6)
        sizes = []
        for kind, exact in (("exp_avg", m), ("exp_avg_sq", v)):
            found = stored(piece.state, kind, rule, record)
            if rule is ADAMW_BF16:
                assert (np.abs(found - exact) <= 2.0**-7 * np.abs(exact) * (1 + 1e-5)).all()
                drift.append(((found - exact) / np.abs(exact)).mean() / (2.0**-8 / math.sqrt(n)))
                sizes.append((np.abs(found) - np.abs(exact)) / np.abs(exact))
            elif len(shape) > 1 and shape[1] % 128:
                np.testing.assert_allclose(found, exact, rtol=0, atol=1e-6)
        if sizes:
            assert abs(np.corrcoef(*sizes)[0, 1]) < 5 / math.sqrt(n), "both moments are rounded by the same draw"
    assert all(abs(x) < 5 for x in drift), "rounding has a direction"


def stored(state: Any, kind: str, rule: BlockRule, record: ParameterRecord) -> np.ndarray:
    """What a moment stands for; of codes, by the values that torchao recorded."""
    if kind in state:
        return wide(state[kind])
    from test_narrow_adamw import TORCHAO

    values = np.asarray(TORCHAO["signed" if kind == "exp_avg" else "unsigned"]["values"])
    if not state[f"{kind}_scale"].any():
        return np.zeros(record.numel)
    codes = values[state[f"{kind}_codes"].numpy()].reshape(-1, 128)
    return (codes * wide(state[f"{kind}_scale"])[:, None]).ravel()
