"""AdamW with moments in bf16 and in 8 bits: torchao's codec, torch's AdamW, parts that give the bits of the whole."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch
from record_torchao import HYPER, RECORD, blocks, weights_and_gradients

from megatron_port.core.config.checks import problems
from megatron_port.core.config.model import RecurrentConfig
from megatron_port.core.config.schema import (
    BatchConfig,
    DataConfig,
    LayoutConfig,
    ModelConfig,
    OptimizerConfig,
    ParameterGroup,
    PrecisionConfig,
    RunConfig,
)
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.counter import random_bits
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.record import InitSpec, ParameterRecord
from megatron_port.core.engine.api import StepLimits
from megatron_port.core.layers.providers import torch_providers
from megatron_port.core.optim.buckets import StateShard
from megatron_port.core.optim.rules import BlockRule, UpdateSettings
from megatron_port.ext.kernels.kernels import kernels_status
from megatron_port.ext.kernels.kernels import load as load_kernels
from megatron_port.ext.kernels.narrow_adamw import (
    ADAMW_8BIT,
    ADAMW_BF16,
    code_values,
    dequantised,
    quantise_,
    round_stochastically,
)
from megatron_port.ext.kernels.ops.optimizer import BLOCK
from megatron_port.run.build import build_engine
from megatron_port.tools.plan.engines import state_bytes

CPU = torch.device("cpu")
TORCHAO = json.loads(RECORD.read_text())


def record_of(
    shape: tuple[int, ...], local: tuple[int, ...] | None = None, offset: tuple[int, ...] | None = None
) -> ParameterRecord:
    local, offset = local or shape, offset or (0,) * len(shape)
    return ParameterRecord("layers.0.mlp.up.weight", shape, local, offset, local, (), InitSpec("normal", 1.0), True)


def piece_of(rule: BlockRule, record: ParameterRecord, start: int, master: torch.Tensor) -> StateShard:
    state = {
        kind.name: torch.zeros(master.numel() // kind.block, dtype=kind.dtype or master.dtype)
        for kind in rule.state(record)
    }
    return StateShard(record, start, master, master, torch.zeros_like(master), state)


def settings(step: int) -> UpdateSettings:
    (b1, b2), rest = HYPER["betas"], HYPER  # type: ignore[misc]
    return UpdateSettings(
        step=step, lr=float(rest["lr"]), weight_decay=float(rest["weight_decay"]), beta1=b1, beta2=b2,  # type: ignore[arg-type, has-type]
        eps=float(rest["eps"]), seed=9,  # type: ignore[arg-type]
    )


def updated(
    rule: BlockRule, record: ParameterRecord, start: int, master: torch.Tensor, gradients: Sequence[torch.Tensor]
) -> StateShard:
    """A part after as many updates as there are gradients."""
    piece = piece_of(rule, record, start, master.clone())
    for step, gradient in enumerate(gradients, 1):
        piece.gradient.copy_(gradient)
        rule.update_(piece, settings(step))
    return piece


# ------------------------------------------------------------------------------------------------ the codec


@pytest.mark.parametrize("name", ["signed", "unsigned"])
def test_codec_is_torchaos(name: str) -> None:
    """Values, scales, codes and what they stand for, to the bit."""
    wanted, x = TORCHAO[name], torch.from_numpy(blocks()).flatten()
    x = x if name == "signed" else x**2
    values = code_values(name == "signed", CPU)
    assert torch.equal(values, torch.tensor(wanted["values"]))
    codes, scale = torch.zeros(x.numel(), dtype=torch.uint8), torch.zeros(x.numel() // BLOCK)
    quantise_(x, codes, scale, values)
    assert codes.numpy().tobytes().hex() == wanted["codes"]
    assert torch.equal(scale, torch.tensor(wanted["scale"]))
    assert torch.equal(dequantised(codes, scale, values), torch.tensor(wanted["dequantised"]))


def test_three_steps_are_torchaos() -> None:
    start, gradients = weights_and_gradients()
    given = [torch.from_numpy(g).flatten() for g in gradients]
    piece = updated(ADAMW_8BIT, record_of((32, 256)), 0, torch.from_numpy(start).flatten(), given)
    for kind in ("exp_avg", "exp_avg_sq"):
        wanted = torch.frombuffer(bytearray.fromhex(TORCHAO[kind]["codes"]), dtype=torch.uint8)
        assert (piece.state[f"{kind}_codes"] != wanted).sum() <= 2, kind  # a last bit before rounding
        scale = torch.tensor(TORCHAO[kind]["scale"])
        torch.testing.assert_close(piece.state[f"{kind}_scale"], scale, rtol=1e-6, atol=0)
    torch.testing.assert_close(piece.master.view(32, 256)[5], torch.tensor(TORCHAO["row"]), rtol=0, atol=1e-6)


def test_both_stay_near_torchs_adamw() -> None:
    start, gradients = weights_and_gradients()
    parameter = torch.nn.Parameter(torch.from_numpy(start).double())
    adamw = torch.optim.AdamW([parameter], **HYPER)  # type: ignore[arg-type]
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient).double()
        adamw.step()
    moved = (parameter.detach().flatten() - torch.from_numpy(start).flatten()).norm()
    for rule, bound in ((ADAMW_BF16, 4e-3), (ADAMW_8BIT, 4e-2)):
        given = [torch.from_numpy(g).flatten() for g in gradients]
        piece = updated(rule, record_of((32, 256)), 0, torch.from_numpy(start).flatten(), given)
        assert (piece.master - parameter.detach().flatten()).norm() < bound * moved


# ------------------------------------------------------------------------------------------------ parts


@pytest.mark.parametrize("rule", [ADAMW_BF16, ADAMW_8BIT], ids=["bf16", "8bit"])
@pytest.mark.parametrize(("name", "dim"), [("rows", 1), ("columns", 2), ("packed", 0)])
def test_parts_have_the_bits_of_the_whole(rule: BlockRule, name: str, dim: int) -> None:
    """Two tensor-parallel ranks, each divided over three shards at block boundaries, and padding behind the last."""
    shape = (2, 24, 512)
    generator = torch.Generator().manual_seed(2)
    master, *gradients = (torch.randn(shape, generator=generator) for _ in range(4))
    whole = updated(rule, record_of(shape), 0, master.flatten(), [g.flatten() for g in gradients])
    size = shape[dim] // 2
    for rank in range(2):
        part = [slice(None)] * 3
        part[dim] = slice(rank * size, (rank + 1) * size)
        local = tuple(size if d == dim else n for d, n in enumerate(shape))
        record = record_of(shape, local, tuple(rank * size if d == dim else 0 for d in range(3)))
        flat, given = master[tuple(part)].flatten(), [g[tuple(part)].flatten() for g in gradients]
        ends = [0, 3 * BLOCK, 17 * BLOCK, flat.numel()]
        for start, stop in zip(ends, ends[1:]):
            piece = updated(rule, record, start, flat[start:stop], [g[start:stop] for g in given])
            assert torch.equal(piece.master, whole.master.view(shape)[tuple(part)].flatten()[start:stop])
            for kind in rule.state(record):
                wide = whole.state[kind.name].view(*shape[:-1], shape[-1] // kind.block)
                cut = list(part)
                if dim == 2:
                    cut[2] = slice(rank * size // kind.block, (rank + 1) * size // kind.block)
                wanted = wide[tuple(cut)].flatten()[start // kind.block : stop // kind.block]
                assert torch.equal(piece.state[kind.name], wanted), kind.name


def test_bf16_moments_are_rounded_by_seed_name_step_and_element() -> None:
    record, given = record_of((4, 128)), [torch.full((512,), 0.3)]
    first = updated(ADAMW_BF16, record, 0, torch.zeros(512), given)
    names = dataclasses.replace(record, name="layers.1.mlp.up.weight")
    other = updated(ADAMW_BF16, names, 0, torch.zeros(512), given)
    for kind in ("exp_avg", "exp_avg_sq"):
        assert len(set(first.state[kind].tolist())) == 2, "equal elements are rounded both ways"
        assert not torch.equal(first.state[kind], other.state[kind])
    exact = 0.05 * 0.3**2
    assert abs(float(first.state["exp_avg_sq"].double().mean()) / exact - 1) < 5e-4


def test_a_second_moment_grows_in_bf16_although_its_steps_are_below_a_rounding() -> None:
    record, gradient = record_of((64, 128)), torch.ones(8192)
    piece = piece_of(ADAMW_BF16, record, 0, torch.zeros(8192))
    near_one = dataclasses.replace(settings(1), beta2=0.999)
    for step in range(1, 1500):
        piece.gradient.copy_(gradient)
        ADAMW_BF16.update_(piece, dataclasses.replace(near_one, step=step))
    mean = float(piece.state["exp_avg_sq"].double().mean())
    assert abs(mean / (1 - 0.999**1499) - 1) < 0.01  # rounded to nearest it would stop near 0.25


def test_rounding_is_unbiased_and_keeps_what_is_not_finite() -> None:
    x = torch.tensor([1.0 + 2.0**-9, -3.0 - 2.0**-8, 2.0**-120, math.inf, -math.inf, math.nan])
    random = random_bits(torch.arange(60000).view(-1, 1), 3, 1).expand(-1, 6)
    found = round_stochastically(x.expand(60000, 6).contiguous(), random.contiguous()).float()
    assert torch.equal(found[:, 3], x[3].expand(60000)) and torch.equal(found[:, 4], x[4].expand(60000))
    assert bool(found[:, 5].isnan().all())
    means = found[:, :3].double().mean(dim=0)
    assert (means / x[:3].double() - 1).abs().max() < 1e-4  # rounding to nearest would be off by 2e-3
    assert set(found[:, 0].tolist()) == {1.0, 1.0 + 2.0**-7}


# ------------------------------------------------------------------------------------------------ what it takes


def test_bytes_and_which_parameters_are_narrow() -> None:
    assert state_bytes(ADAMW_8BIT, record_of((1024, 4096))) == 2 * (1 + 4 / 128) == 2.0625
    assert state_bytes(ADAMW_BF16, record_of((1024, 4096))) == 4
    for odd in ((1024, 100), (4096,)):
        assert state_bytes(ADAMW_8BIT, record_of(odd)) == 8
    assert ADAMW_8BIT.alignment % BLOCK == 0


@pytest.mark.parametrize(("change", "says"), [
    ({"num_attention_heads": 4, "head_dim": 64, "ffn_hidden_size": 384}, "leaves each rank 192 of the 384 inputs"),
    ({"num_attention_heads": 4, "head_dim": 32, "ffn_hidden_size": 512}, "leaves each rank 64 of the 128 inputs"),
    ({"num_attention_heads": 4, "head_dim": 64, "ffn_hidden_size": 512, "mixer_pattern": ("attention", "mamba2"),
      "recurrent": RecurrentConfig(heads=8, value_size=16)},
     "64 of the 128 inputs of the output projection of model.mixer 'mamba2'"),
    ({"num_attention_heads": 4, "head_dim": 64, "ffn_hidden_size": 512, "mixer": "attention_mamba2", "add_bias": False,
      "recurrent": RecurrentConfig(heads=8, value_size=16)},
     "64 of the 128 inputs of the second output projection of model.mixer 'attention_mamba2'"),
])
def test_a_layout_that_would_cut_blocks_is_refused(change: dict[str, Any], says: str) -> None:
    model = ModelConfig(**{"hidden_size": 128, "num_layers": 2, "vocab_size": 53, "seq_length": 16, **change})
    config = RunConfig(
        engine="native", model=model, layout=LayoutConfig(tensor_parallel_size=2), data=DataConfig(synthetic=True),
        optimizer=OptimizerConfig(name="adamw-8bit"),
    )
    assert any(says in problem for problem in problems(config))
    assert not problems(dataclasses.replace(config, optimizer=OptimizerConfig(name="adamw-bf16")))
    fits = dataclasses.replace(model, head_dim=64, ffn_hidden_size=512, mixer_pattern=(), recurrent=RecurrentConfig())
    assert not problems(dataclasses.replace(config, model=fits))


# ------------------------------------------------------------------------------------------------ own kernels


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("rule", ["adamw-bf16", "adamw-8bit", "lion"])
def test_kernels_train_as_torchs_ops(rule: str, dtype: Literal["fp32", "bf16"]) -> None:
    """A few steps with a group, clipping and a value limit; a step that is refused changes nothing."""
    if not kernels_status("cpu")[0]:
        pytest.skip("own kernels are not built")
    load_kernels("cpu")
    model = ModelConfig(
        num_layers=1, hidden_size=128, num_attention_heads=2, ffn_hidden_size=256, vocab_size=53, seq_length=16
    )
    config = RunConfig(
        engine="native", model=model, batch=BatchConfig(global_batch_size=2), data=DataConfig(synthetic=True),
        precision=PrecisionConfig(dtype=dtype), optimizer=OptimizerConfig(
            name=rule, eps=1e-4, clip_grad=0.3, clip_value=0.01, groups=(ParameterGroup(match="norm", lr_factor=2.0),)
        ),
    )
    engines = [
        build_engine(config, ParallelContext.single(), dataclasses.replace(torch_providers(), optimizer=provider))
        for provider in ("torch", "own")
    ]
    both = torch.randint(0, 53, (2, 17), generator=torch.Generator().manual_seed(1))
    batch = MicroBatch((0, 1), tokens=both[:, :-1], labels=both[:, 1:])
    start = {r.name: p.detach().float().clone() for r, p in engines[0].named_parameters()}
    results = [[engine.train_step([batch], step=step, lr=3e-3) for step in range(3)] for engine in engines]
    for ours, theirs in zip(*results):
        assert ours.loss == pytest.approx(theirs.loss, rel=2e-3)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=2e-2)
    weights = [{r.name: p.detach().float().clone() for r, p in engine.named_parameters()} for engine in engines]
    for name, w in weights[0].items():
        moved = (w - start[name]).norm()
        if not name.endswith("qkv.bias"):  # key biases have a zero gradient, whose rounding has a sign
            assert (w - weights[1][name]).norm() <= (0.1 if dtype == "bf16" else 0.02) * moved, name
    own = engines[1]
    before = {(p.name, p.kind): p.tensor.clone() for p in own.state_pieces()}
    refused = own.train_step([batch], step=3, lr=3e-3, limits=StepLimits(loss=1e-3))
    assert refused.skipped and all(torch.equal(before[p.name, p.kind], p.tensor) for p in own.state_pieces())
    assert own.scalar_state()["optimizer_steps"] == 3
