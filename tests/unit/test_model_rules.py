"""Decay classes by kind of parameter, and rotary positions far beyond the tests' usual 32 tokens."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from test_streams import models, twin_shape
from twin import model as twin_model
from twin.half import sample_rows
from twin.model import no_dropout, token_losses

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
from megatron_port.core.dist.positions import Positions
from megatron_port.core.engine.native import NativeEngine
from megatron_port.core.engine.native_update import make_update
from megatron_port.core.model.rotary import RotaryTables
from megatron_port.core.model.shapes import model_records
from megatron_port.core.optim.rules import StepNumbers, StepValues
from megatron_port.ext.kernels.choose import choose_providers
from megatron_port.run.build import DTYPES, build_engine
from megatron_port.run.device import choose_device

DType = Literal["fp32", "fp64"]
Own = Literal["on", "off"]
ROPE = ModelConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=40, vocab_size=61,
    seq_length=600, position_embedding="rope", rope_theta=10000.0, normalization="rmsnorm", activation="swiglu",
    add_bias=False, tie_embeddings=False, init_std=0.2,
)


def engine_of(model: ModelConfig, dtype: DType, own_kernels: Own) -> NativeEngine:
    config = RunConfig(
        engine="native", seed=5, model=model, layout=LayoutConfig(vocab_padding_multiple=1),
        batch=BatchConfig(micro_batch_size=1, global_batch_size=1), precision=PrecisionConfig(dtype=dtype),
        optimizer=OptimizerConfig(weight_decay=0.3), backend=BackendConfig(device="cpu", own_kernels=own_kernels),
    )
    providers = choose_providers(
        config.backend, choose_device("cpu"), DTYPES[dtype], engine="native", attention_dropout=0.0, fp8="none"
    )
    engine = build_engine(config, ParallelContext.single(), providers)
    assert isinstance(engine, NativeEngine)
    return engine


# ---------------------------------------------------------------- decay


@settings(max_examples=25, deadline=None)
@given(models())
def test_records_decay_by_kind(model: ModelConfig) -> None:
    """Matrices and embeddings do, biases and norms do not; shapes, starts and names are the documented ones."""
    want, records = twin_model.shapes(twin_shape(model)), model_records(model)
    assert set(records) == set(want)
    for name, record in records.items():
        shape, kind = want[name]
        assert record.shape == shape, name
        assert record.decay == (kind in ("normal", "output")), name
        assert record.decay == (len(record.shape) > 1 and not name.endswith(".bias")), name
        assert record.init.kind == ("normal" if kind == "output" else kind), name
        if record.init.kind == "normal":
            std = model.init_std / (np.sqrt(2 * model.num_layers) if kind == "output" else 1)
            assert record.init.std == pytest.approx(std, rel=1e-12), name


@pytest.mark.parametrize("provider", ["torch", "own"])
@pytest.mark.parametrize("bias", [True, False])
def test_an_update_without_gradient_is_decay_alone(provider: str, bias: bool) -> None:
    """Every weight times 1 - rate · decay, every bias and norm as it was, through the update itself."""
    engine = engine_of(dataclasses.replace(
        ROPE, seq_length=8, add_bias=bias, normalization="layernorm", position_embedding="learned"
    ), "fp32", "on" if provider == "own" else "off")
    update = make_update(provider, engine.sharded, engine.config.optimizer)
    values = StepValues(torch.device("cpu"))
    values.set(StepNumbers(lr=0.1))
    before = {}
    for piece in engine.sharded.pieces:
        piece.master.add_(0.5)  # biases too
        piece.gradient.zero_()
        before[piece.record.name] = piece.master.clone()
    _, refused = update.step(torch.zeros(()), values, skip=torch.zeros(()))
    assert not bool(refused)
    for piece in engine.sharded.pieces:
        name = piece.record.name
        decays = name.endswith(".weight") and "norm" not in name
        want = before[name] * (1 - 0.1 * 0.3) if decays else before[name]
        torch.testing.assert_close(piece.master, want, rtol=1e-6, atol=0, msg=name)


# ---------------------------------------------------------------- rope


@pytest.mark.parametrize("asked", [(600,), (16, 600), (8, 100, 90, 599), (600, 7)])
def test_tables_are_the_formula_at_every_position(asked: tuple[int, ...]) -> None:
    """Also when they have grown from shorter ones."""
    tables = RotaryTables(ROPE)
    for seq in asked:
        cos, sin = tables.rows(Positions.contiguous(seq), torch.device("cpu"))
        assert len(cos) == len(sin) == seq
        half = ROPE.head_size // 2
        frequency = ROPE.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
        angle = np.arange(len(cos), dtype=np.float64)[:, None] * frequency
        # An angle of up to 600 has a rounding error of 600 · 2^-24 in float32, twice.
        np.testing.assert_allclose(cos.numpy(), np.cos(angle), atol=1e-4)
        np.testing.assert_allclose(sin.numpy(), np.sin(angle), atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "own", "bound"), [("fp64", "off", 1e-10), ("fp32", "off", 1e-5), ("fp32", "on", 1e-5)]
)
def test_losses_at_600_tokens_are_the_twins(dtype: DType, own: Own, bound: float) -> None:
    """Stretch by stretch: the mask lets in the labels of one after the other."""
    engine = engine_of(ROPE, dtype, own)
    both = torch.from_numpy(sample_rows([1], ROPE.seq_length, ROPE.vocab_size))
    tokens, labels = both[:, :-1], both[:, 1:]
    shape = twin_shape(ROPE)
    weights = {n: w.double() for n, w in twin_model.initial(shape, 5).items()}
    want = token_losses(tokens, labels, weights, shape, no_dropout)
    for first, last in ((0, 32), (32, 64), (250, 350), (500, 600)):
        mask = torch.zeros(1, 600)
        mask[:, first:last] = 1
        result = engine.eval_step([MicroBatch((0,), tokens=tokens, labels=labels, loss_mask=mask)])
        assert result.loss == pytest.approx(float(want[:, first:last].mean()), rel=bound), (first, last)
