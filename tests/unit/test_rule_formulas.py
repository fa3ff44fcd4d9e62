"""Rules of sums and of matrices against torch.optim and the papers' formulas, matrix by matrix, on one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import rule_twins
import torch
from contexts import slice_record
from fake_ranks import fake_rank
from rule_twins import Twin
from torch import nn

from megatron_port.core.config.optimizer import (
    AdafactorOptions,
    AdagradOptions,
    CAMEOptions,
    LAMBOptions,
    MuonOptions,
)
from megatron_port.core.config.schema import (
    BatchConfig,
    DataConfig,
    LayoutConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
)
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.record import InitSpec, ParameterRecord, attach
from megatron_port.core.engine.native import NativeEngine
from megatron_port.core.engine.native_update import make_update
from megatron_port.core.optim.rules import StepNumbers, StepValues, rule_of
from megatron_port.core.optim.sharded import ShardedParameters, ShardSettings
from megatron_port.ext.rules.matrices import assign, orthogonalized, shapes_of
from megatron_port.ext.rules.sums import rectangles
from megatron_port.tools.plan.engines import state_bytes

STEPS, LR = 6, 0.02
SHAPES: dict[str, tuple[tuple[int, ...], bool, tuple[int, ...]]] = {
    "layers.0.attention.qkv.weight": ((24, 10), True, (6, 3, 3)),
    "layers.0.mlp.up.weight": ((2, 8, 10), True, ()),
    "layers.0.mlp.experts.up.weight": ((3, 2, 4, 10), True, ()),
    "layers.0.mlp.down.weight": ((10, 8), True, ()),
    "layers.0.mlp.up.bias": ((2, 8), False, ()),
    "final_norm.weight": ((10,), False, ()),
    "embedding.tokens.weight": ((13, 10), True, ()),
}
"""Name → logical shape, whether it decays, row runs."""
WEIGHTS = {"layers.0.mlp.down.weight": 1e-4, "layers.0.mlp.up.bias": 0.0}
GRADIENTS = {"layers.0.mlp.up.weight": 1e-9, "final_norm.weight": 1e-9}
"""Name → size of the first weights, and of the gradients, where it is not 1: floors and epsilons are met."""
SPIKE = 3
"""Number of the update whose gradients are 30 times as large: bounds of an update are met."""


def records() -> list[ParameterRecord]:
    return [
        slice_record(name, shape, init=InitSpec("zeros"), decay=decay, row_runs=runs)
        for name, (shape, decay, runs) in SHAPES.items()
    ]


def members(record: ParameterRecord, *, split_rows: bool) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """How to take each logical matrix or vector out of a parameter."""
    dims = 2 if record.decay else 1
    lead = math.prod(record.shape[:-dims])

    def taken(number: int, start: int, length: int, cycle: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def take(tensor: torch.Tensor) -> torch.Tensor:
            one = tensor.reshape(lead, *record.shape[-dims:])[number]
            return one if not cycle else one.reshape(-1, cycle, one.shape[-1])[:, start : start + length].reshape(
                -1, one.shape[-1])
        return take

    if split_rows and record.row_runs:
        starts = [sum(record.row_runs[:i]) for i in range(len(record.row_runs))]
        return [taken(0, s, n, sum(record.row_runs)) for s, n in zip(starts, record.row_runs)]
    return [taken(i, 0, 0, 0) for i in range(lead)]


def trained(config: OptimizerConfig, dtype: torch.dtype = torch.float64) -> Iterator[tuple[Any, Any, Any]]:
    """Yield, before each update and after the last, the weights, the gradients and the sharded parameters."""
    generator = torch.Generator().manual_seed(7)
    pairs = []
    for record in records():
        value = torch.randn(record.shape, dtype=torch.float64, generator=generator) * WEIGHTS.get(record.name, 1.0)
        value = value.to(dtype)
        pairs.append((record, attach(nn.Parameter(value), record)))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    sharded = ShardedParameters(
        [[pairs]], ParallelContext.single(), ShardSettings(master_dtype=wide, split_state=False, capacity=200),
        rule=rule_of(config),
    )
    for piece in sharded.pieces:
        piece.master.copy_(piece.weight)
    update, values = make_update("torch", sharded, config), StepValues(torch.device("cpu"))
    for number in range(1, STEPS + 1):
        size = 30.0 if number == SPIKE else 1.0
        gradients = {
            r.name: torch.randn(r.shape, dtype=wide, generator=generator) * (size * GRADIENTS.get(r.name, 1.0))
            for r, _ in pairs
        }
        gradients["layers.0.mlp.down.weight"][3] = 0.0  # a row that is never met
        yield {p.record.name: p.master.view(p.record.shape).clone() for p in sharded.pieces}, gradients, sharded
        for piece in sharded.pieces:
            piece.gradient.copy_(gradients[piece.record.name].reshape(-1))
        values.set(StepNumbers(lr=config.lr))
        update.step(torch.ones((), dtype=torch.float64), values, skip=torch.zeros(()))
    yield {p.record.name: p.master.view(p.record.shape).clone() for p in sharded.pieces}, None, sharded


def follow(
    config: OptimizerConfig, step: Callable[[Twin, torch.Tensor, bool], None], *, split_rows: bool = False,
    takes: Callable[[str], bool] = lambda name: True,
) -> None:
    """Compare each matrix and vector with its twin over all updates."""
    twins: dict[tuple[str, int], Twin] = {}
    for weights, gradients, _ in trained(config):
        for record in records():
            if not takes(record.name):
                continue
            for i, take in enumerate(members(record, split_rows=split_rows)):
                twin = twins.setdefault((record.name, i), Twin(take(weights[record.name]).clone()))
                torch.testing.assert_close(take(weights[record.name]), twin.w, rtol=1e-11, atol=1e-11)
                if gradients is not None:
                    step(twin, take(gradients[record.name]), record.decay)
    assert len(twins) > 5


def config_of(name: str, **more: Any) -> OptimizerConfig:
    return OptimizerConfig(**{
        "name": name, "lr": LR, "clip_grad": 0.0, "weight_decay": 0.1, "beta2": 0.97, "eps": 1e-6, **more,
    })


def test_sm3_is_the_papers_formula() -> None:
    follow(config_of("sm3"), lambda t, g, decays: rule_twins.sm3(t, g, lr=LR, beta1=0.9, decay=0.1 if decays else 0.0))


@pytest.mark.parametrize("options", [
    CAMEOptions(), CAMEOptions(beta3=0.9, clip_update=0.5), CAMEOptions(eps_square=0.3, eps_instability=0.2),
    CAMEOptions(beta3=0.5, eps_square=1e-19, eps_instability=1e-3),
])
def test_came_is_the_papers_formula(options: CAMEOptions) -> None:
    follow(config_of("came", came=options, beta1=0.8), lambda t, g, decays: rule_twins.came(
        t, g, lr=LR, betas=(0.8, 0.97, options.beta3), decay=0.1 if decays else 0.0, d=options.clip_update,
        eps=(options.eps_square, options.eps_instability),
    ))


@pytest.mark.parametrize("vectors", [False, True])
def test_lamb_is_the_papers_formula(vectors: bool) -> None:
    follow(config_of("lamb", lamb=LAMBOptions(adapts_vectors=vectors)), lambda t, g, decays: rule_twins.lamb(
        t, g, lr=LR, betas=(0.9, 0.97), eps=1e-6, decay=0.1 if decays else 0.0, ratio=decays or vectors,
    ))


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon_is_a_polynomial_of_singular_values(adjust: Any) -> None:
    """Queries, keys and values apart, gate and up, each expert; AdamW (torch's) for what is no matrix of a layer."""
    factors = {"original": lambda r, c: 0.5 * math.sqrt(max(1, r / c)),
               "match_rms_adamw": lambda r, c: 0.5 * 0.2 * math.sqrt(max(r, c))}
    nesterov, steps = (True, 5) if adjust == "original" else (False, 3)
    config = config_of("muon", muon=MuonOptions(
        adjust_lr=adjust, lr_factor=0.5, nesterov=nesterov, ns_steps=steps, momentum=0.9))
    follow(
        config, lambda t, g, decays: rule_twins.muon(
            t, g, lr=LR, momentum=0.9, decay=0.05, factor=factors[adjust], nesterov=nesterov, steps=steps),
        split_rows=True, takes=lambda name: name.startswith("layers.") and name.endswith("weight"),
    )
    theirs: dict[str, tuple[torch.Tensor, torch.optim.Optimizer]] = {}
    for weights, gradients, _ in trained(config):
        for name in ("layers.0.mlp.up.bias", "final_norm.weight", "embedding.tokens.weight"):
            if name not in theirs:
                p = weights[name].clone()
                decay = 0.1 if SHAPES[name][1] else 0.0
                theirs[name] = p, torch.optim.AdamW([p], lr=LR, betas=(0.9, 0.97), eps=1e-6, weight_decay=decay)
            p, adam = theirs[name]
            torch.testing.assert_close(weights[name], p, rtol=1e-12, atol=1e-12)
            if gradients is not None:
                p.grad = gradients[name]
                adam.step()


@pytest.mark.parametrize("options", [MuonOptions(), MuonOptions(momentum=0.8, nesterov=False, ns_steps=4)])
def test_muon_in_bf16_is_torchs(options: MuonOptions) -> None:
    theirs: dict[tuple[str, int], tuple[torch.Tensor, torch.optim.Optimizer]] = {}
    for weights, gradients, _ in trained(config_of("muon", muon=options), torch.bfloat16):
        for record in records():
            if not (record.decay and record.name.startswith("layers.")):
                continue
            for i, take in enumerate(members(record, split_rows=True)):
                if (record.name, i) not in theirs:
                    p = take(weights[record.name]).clone()
                    theirs[record.name, i] = p, torch.optim.Muon(
                        [p], lr=LR, weight_decay=0.1, adjust_lr_fn="match_rms_adamw", momentum=options.momentum,
                        nesterov=options.nesterov, ns_steps=options.ns_steps)
                p, other = theirs[record.name, i]
                torch.testing.assert_close(take(weights[record.name]), p, rtol=1e-6, atol=1e-6)
                if gradients is not None:
                    p.grad = take(gradients[record.name]).clone()
                    other.step()


@pytest.mark.parametrize(("options", "lr"), [
    (AdafactorOptions(), LR), (AdafactorOptions(), 0.55),
    (AdafactorOptions(beta2_decay=-0.5, eps_variance=1e-4, eps_scale=0.1, clip_update=1.1), LR),
    (AdafactorOptions(beta2_decay=-1.0, eps_variance=0.5, eps_scale=2.0, clip_update=3.0), 2.0),
], ids=["as it is", "a rate above the root of the fourth step", "floors", "high floors and no bound of the rate"])
def test_adafactor_is_torchs(options: AdafactorOptions, lr: float) -> None:
    theirs: dict[tuple[str, int], tuple[torch.Tensor, torch.optim.Optimizer]] = {}
    for weights, gradients, _ in trained(config_of("adafactor", adafactor=options, lr=lr)):
        for record in records():
            for i, take in enumerate(members(record, split_rows=False)):
                if (record.name, i) not in theirs:
                    p = take(weights[record.name]).clone()
                    theirs[record.name, i] = p, torch.optim.Adafactor(
                        [p], lr=lr, beta2_decay=options.beta2_decay,
                        eps=(options.eps_variance or None, options.eps_scale),
                        d=options.clip_update, weight_decay=0.1 if record.decay else 0.0,
                    )
                p, other = theirs[record.name, i]
                torch.testing.assert_close(take(weights[record.name]), p, rtol=1e-11, atol=1e-11)
                if gradients is not None:
                    p.grad = take(gradients[record.name]).clone()
                    other.step()


@pytest.mark.parametrize(("relative", "lr"), [(False, 0.7), (True, LR), (True, 0.7)])
def test_adafactors_momentum_is_the_papers(relative: bool, lr: float) -> None:
    options = AdafactorOptions(momentum=0.8, relative=relative)
    follow(config_of("adafactor", adafactor=options, lr=lr), lambda t, g, decays: rule_twins.adafactor(
        t, g, lr=lr, decay=0.1 if decays else 0.0, momentum=0.8, relative=relative,
    ))


def test_a_steep_matrix_is_brought_near_the_orthogonal() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((20, 50), (50, 20), (30, 30)):
        values = torch.linalg.svdvals(orthogonalized(torch.randn(shape, dtype=torch.float64, generator=generator), 5))
        assert values.min() > 0.2 and values.max() < 1.3
    assert not orthogonalized(torch.zeros(3, 4), 5).any()


@pytest.mark.parametrize(("start", "stop"), [(0, 60), (3, 57), (7, 8), (19, 41), (20, 40), (5, 5)])
def test_rectangles_cover_a_range_once(start: int, stop: int) -> None:
    seen = torch.zeros(3, 4, 5, dtype=torch.int64)
    flat = torch.arange(60)
    for largest in (1, 7, 1 << 20):
        seen.zero_()
        for r in rectangles(start, stop, 4, 5, largest=largest):
            at = seen.view(12, 5)[r.rows, r.columns]
            at += 1
            assert r.rows.start // 4 == (r.rows.stop - 1) // 4 == r.matrix
            assert torch.equal(r.view(flat[start:stop]), flat.view(12, 5)[r.rows, r.columns])
        assert torch.equal(seen.view(-1), ((flat >= start) & (flat < stop)).long())


def test_owners_share_the_work() -> None:
    assert assign([1.0, 9.0, 5.0, 4.0, 4.0], 2) == [1, 0, 1, 1, 0]
    costs = [float(c) for c in (8, 8, 6, 6, 2, 2, 1, 1)]
    loads = [sum(c for c, rank in zip(costs, assign(costs, 4)) if rank == r) for r in range(4)]
    assert max(loads) == 9 and min(loads) >= 8
    record = records()[0]
    assert shapes_of(record) == [(12, 10), (6, 10), (6, 10)]


@pytest.mark.parametrize(("name", "expected"), [
    ("adamw", 8.0), ("lion", 4.0), ("sgd", 4.0), ("adagrad", 4.0), ("lamb", 8.0), ("muon", 4.0),
    ("adafactor", 4 * (1000 + 500) / 500_000), ("sm3", 4 + 4 * 1500 / 500_000), ("came", 4 + 8 * 1500 / 500_000),
])
def test_bytes_of_state(name: str, expected: float) -> None:
    record = slice_record("layers.0.mlp.down.weight", (1000, 500), init=InitSpec("zeros"), decay=True)
    assert state_bytes(rule_of(OptimizerConfig(name=name)), record) == pytest.approx(expected, rel=1e-12)
    if name in ("adagrad", "adafactor"):
        averaged = OptimizerConfig(
            name=name, adagrad=AdagradOptions(momentum=0.9), adafactor=AdafactorOptions(momentum=0.9))
        assert state_bytes(rule_of(averaged), record) == pytest.approx(expected + 4.0, rel=1e-12)


TABLE: dict[str, Callable[[int, int], float]] = {
    "adamw": lambda r, c: 8.0, "adamw-bf16": lambda r, c: 4.0,
    "adamw-8bit": lambda r, c: 2.0625 if c % 128 == 0 else 8.0,
    "lion": lambda r, c: 4.0, "sgd": lambda r, c: 4.0, "adagrad": lambda r, c: 4.0, "lamb": lambda r, c: 8.0,
    "adafactor": lambda r, c: 4 * (r + c) / (r * c), "came": lambda r, c: 4 + 8 * (r + c) / (r * c),
    "sm3": lambda r, c: 4 + 4 * (r + c) / (r * c), "muon": lambda r, c: 4.0,
}
"""docs/optimizers.md: bytes of state for each element of a matrix of r rows and c columns."""


@pytest.mark.parametrize("rule", TABLE)
def test_memory_is_what_the_table_says(rule: str) -> None:
    model = ModelConfig(num_layers=1, hidden_size=128, num_attention_heads=4, ffn_hidden_size=192, vocab_size=96,
                        seq_length=8)
    config = RunConfig(
        model=model, engine="native", data=DataConfig(synthetic=True), precision=PrecisionConfig(dtype="bf16"),
        batch=BatchConfig(micro_batch_size=1, global_batch_size=1), optimizer=OptimizerConfig(name=rule),
        layout=LayoutConfig(data_parallel_size=1, zero_stage=1),
    )
    with fake_rank(config, 0) as (engine, _, _):
        assert isinstance(engine, NativeEngine)
        sharded, found = engine.sharded, dict[str, int]()
        for bucket in sharded.trained:
            padding = 128 * len(bucket.plan.slots)  # elements, at most
            for kind, flat in bucket.state.items():
                ranges = bucket.layouts[kind].ranges
                used = {r.index: flat[r.span].nbytes for r in ranges}
                assert flat.nbytes <= sum(used.values()) + flat.element_size() * padding
                for index, size in used.items():
                    name = sharded.parameters[index][0].name
                    found[name] = found.get(name, 0) + size
    for matrix in ("attention.qkv", "attention.output", "mlp.up", "mlp.down"):
        record = next(r for r, _ in sharded.parameters if r.name == f"layers.0.{matrix}.weight")
        assert found[record.name] == pytest.approx(TABLE[rule](*record.shape[-2:]) * record.numel, rel=1e-12)
