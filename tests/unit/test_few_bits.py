"""Weights on a grid of few bits: plain torch's straight-through gradients, and torchao's values on what is exported."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import gpt2, llama
from transformers import AutoModelForCausalLM

from megatron_port.core.config.checks import problems
from megatron_port.core.config.schema import (
    BackendConfig,
    BatchConfig,
    DataConfig,
    LayoutConfig,
    MoEConfig,
    OptimizerConfig,
    PrecisionConfig,
    QuantisationConfig,
    RunConfig,
)
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.layers.providers import torch_providers
from megatron_port.ext.weights.few_bits import on_grid
from megatron_port.run.build import build_engine
from megatron_port.tools.interop.hf_files import HFFolder

KINDS = ("int8", "int4", "binary")


def theirs(weight: torch.Tensor, kind: str, group: int) -> torch.Tensor:
    """A matrix [outputs, inputs] on the grid, element by element."""
    out = weight.clone()
    for row in out:
        for start in range(0, len(row), group):
            part = row[start : start + group]
            if kind == "binary":
                size = sum(abs(float(x)) for x in part) / group
                part.copy_(torch.tensor([-size if x < 0 else size for x in part.tolist()], dtype=row.dtype))
                continue
            most = {"int8": 128, "int4": 8}[kind]
            scale = max(max(-float(x) / most, float(x) / (most - 1)) for x in part)
            part.copy_(torch.tensor([round(x / scale) * scale for x in part.tolist()], dtype=row.dtype))
    return out


def at_once(weight: torch.Tensor, kind: str, group: int) -> torch.Tensor:
    """The same of all groups together; :func:`test_the_grid_is_the_formulas` compares the two."""
    parts = weight.reshape(-1, group)
    if kind == "binary":
        return torch.where(parts < 0, -1.0, 1.0).mul(parts.norm(p=1, dim=1, keepdim=True) / group).view_as(weight)
    most = {"int8": 128, "int4": 8}[kind]
    scale = torch.stack((-parts.min(dim=1).values / most, parts.max(dim=1).values / (most - 1))).max(dim=0).values
    return torch.round(parts / scale[:, None]).mul(scale[:, None]).view_as(weight)


@pytest.mark.parametrize("kind", KINDS)
def test_the_grid_is_the_formulas(kind: str) -> None:
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x[2, 3] = 0.0
    torch.testing.assert_close(on_grid(x, kind, 8), theirs(x, kind, 8), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(at_once(x, kind, 8), theirs(x, kind, 8), rtol=1e-14, atol=1e-14)
    assert not on_grid(torch.zeros(2, 8), kind, 4).any()  # and no division by zero
    if kind != "binary":
        found = on_grid(x, kind, 8)
        assert torch.equal(on_grid(found, kind, 8).sign(), found.sign())
        levels = [len(group.unique()) for group in on_grid(torch.randn(2, 4096), "int4", 4096)]
        assert max(levels) <= 16


def saved(folder: Path, config: Any) -> Any:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config).double()
    model.save_pretrained(folder)
    return model


def run_of(folder: Path, kind: Any, **changes: Any) -> RunConfig:
    return RunConfig(**{
        "engine": "native", "model": HFFolder(folder).model, "precision": PrecisionConfig(dtype="fp64"),
        "batch": BatchConfig(micro_batch_size=2, global_batch_size=2), "data": DataConfig(synthetic=True),
        "optimizer": OptimizerConfig(clip_grad=0.0), "backend": BackendConfig(device="cpu", attention="math"),
        "quantisation": QuantisationConfig(weights=kind, group_size=16), **changes,
    })


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_plain_torchs_straight_through(tmp_path: Path, kind: str) -> None:
    model, config = saved(tmp_path, gpt2(12, n_layer=2)), run_of(tmp_path, kind)
    engine = build_engine(config, ParallelContext.single(), torch_providers(), initialise=False)
    engine.load_weights(HFFolder(tmp_path).read)
    found: dict[str, torch.Tensor] = {}
    engine.on_gradients = lambda pairs: found.update((r.name, g.clone()) for r, g in pairs)  # type: ignore[attr-defined]
    tokens = torch.randint(0, 101, (2, 13), generator=torch.Generator().manual_seed(9))
    result = engine.train_step([MicroBatch((0, 1), tokens[:, :-1], tokens[:, 1:])], step=0, lr=1e-3)

    def through(module: Any, name: str) -> torch.nn.Module:
        class Straight(torch.nn.Module):
            def forward(self, w: torch.Tensor) -> torch.Tensor:  # Conv1D: [inputs, outputs]
                return w + (at_once(w.detach().t().contiguous(), kind, 16).t() - w).detach()

        torch.nn.utils.parametrize.register_parametrization(module, name, Straight(), unsafe=True)
        return module

    for block in model.transformer.h:
        for linear in (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj):
            through(linear, "weight")
    logits = model(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    assert result.loss == pytest.approx(loss.item(), rel=1e-11)
    block = model.transformer.h[1]
    for name, grad in (
        ("layers.1.mlp.down.weight", block.mlp.c_proj.parametrizations.weight.original.grad.t()),
        ("layers.1.attention.output.weight", block.attn.c_proj.parametrizations.weight.original.grad.t()),
        ("layers.0.norm1.weight", model.transformer.h[0].ln_1.weight.grad),
    ):
        torch.testing.assert_close(found[name], grad, rtol=1e-9, atol=1e-13)
    norm = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters()))  # type: ignore[arg-type]
    assert result.grad_norm == pytest.approx(float(norm), rel=1e-10)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_torchao_gives_an_export_the_weights_that_it_was_trained_with(tmp_path: Path, kind: str) -> None:
    """Post-training quantisation of transformers' model by torchao: the loss that training saw."""
    quantization = importlib.import_module("torchao.quantization")
    model = saved(tmp_path, llama(16, hidden_size=64, intermediate_size=96)).float()
    config = run_of(tmp_path, kind, precision=PrecisionConfig(dtype="fp32"))
    engine = build_engine(config, ParallelContext.single(), torch_providers(), initialise=False)
    engine.load_weights(HFFolder(tmp_path).read)
    tokens = torch.randint(0, 101, (2, 17), generator=torch.Generator().manual_seed(9))
    ours = engine.eval_step([MicroBatch((0, 1), tokens[:, :-1], tokens[:, 1:])]).loss
    before = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    quantization.quantize_(model.model.layers, quantization.IntxWeightOnlyConfig(
        weight_dtype=getattr(torch, kind), granularity=quantization.PerGroup(16),
        mapping_type=quantization.MappingType.SYMMETRIC_NO_CLIPPING_ERR,
    ))
    torch.testing.assert_close(
        model.model.layers[0].mlp.up_proj.weight.dequantize(), on_grid(before, kind, 16), rtol=1e-6, atol=1e-9)
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits
    assert ours == pytest.approx(torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), tokens[:, 1:].flatten()).item(), rel=1e-5)


def test_settings_that_contradict_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, gpt2(12, n_layer=2))
    base = run_of(tmp_path, "int4")
    assert not problems(base)
    model = base.model
    for changed, words in (
        (dataclasses.replace(base, engine="deepspeed"), 'engine "deepspeed"'),
        (dataclasses.replace(base, model=dataclasses.replace(model, moe=MoEConfig(num_experts=4))), "num_experts 4"),
        (dataclasses.replace(base, quantisation=QuantisationConfig(weights="int8", group_size=48)),
         "group_size 48 does not divide the inputs of attention.qkv and mlp.up, model.hidden_size 64"),
        (dataclasses.replace(base, layout=LayoutConfig(tensor_parallel_size=4),
                             quantisation=QuantisationConfig(weights="int8", group_size=32)),
         "64 / tensor_parallel_size 4 = 16 on a rank"),
        (dataclasses.replace(base, quantisation=QuantisationConfig(group_size=4)), "rounds nothing"),
    ):
        found = problems(changed, world_size=changed.layout.tensor_parallel_size)
        assert any(words in problem for problem in found), (words, found)
