"""Families with layers of experts: what differs from dense ones, by transformers' own classes."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import hf_models as hf
import pytest
import torch
from interop_cases import GPT2, saved
from logit_bounds import stage_of

from megatron_port.core.checkpoint.reader import open_checkpoint
from megatron_port.core.config.layout import with_values
from megatron_port.core.config.loader import load
from megatron_port.core.config.model import MoEConfig
from megatron_port.core.config.schema import ModelConfig, RunConfig
from megatron_port.core.dist.record import BUFFER, InitSpec, initial_values
from megatron_port.core.errors import CheckpointError
from megatron_port.core.layers.providers import torch_providers
from megatron_port.core.model.mlp import activate
from megatron_port.core.model.shapes import buffer_shapes
from megatron_port.ext.telemetry.flops import parameter_count
from megatron_port.run.weights import open_initial
from megatron_port.tools.interop.export_hf import export_hf
from megatron_port.tools.interop.hf_config import model_from_hf
from megatron_port.tools.interop.hf_files import HFFolder
from megatron_port.tools.interop.run_import import import_checkpoint

transformers = pytest.importorskip("transformers")


def test_the_clamped_gate_is_gpt_oss_own() -> None:
    """Values, and gradients within, at and beyond the bounds of gate and input."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    sizes = {"num_local_experts": 1, "hidden_size": 8, "intermediate_size": 64, "num_attention_heads": 1}
    theirs = GptOssExperts(transformers.GptOssConfig(num_hidden_layers=1, **sizes))
    halves = 6 * torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    halves[:, :, :2] = torch.tensor([7.0, -7.0], dtype=torch.float64)
    assert (halves.abs() > 7).any() and (halves.abs() < 7).any()
    mine, other = torch.cat(tuple(halves), dim=-1).requires_grad_(), halves.clone().requires_grad_()
    ours = activate(mine, "swiglu_clamped", torch_providers())
    out = theirs._apply_gate(other.permute(1, 2, 0).flatten(1))
    assert torch.allclose(ours, out, rtol=1e-15, atol=1e-14)
    ((ours + out) * torch.arange(64).double().sin()).sum().backward()
    assert mine.grad is not None and other.grad is not None
    assert torch.allclose(mine.grad, torch.cat(tuple(other.grad), dim=-1), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_any_box_of_experts_is_a_slice_of_the_whole(family: str, tmp_path: Path) -> None:
    """So each rank reads its own experts; and the whole is what transformers' own tensor of all experts holds."""
    reference = hf.reference(hf.small(family))
    folder, generator = HFFolder(hf.saved(reference, tmp_path, shard="40KB")), random.Random(1)
    block = reference.model.layers[1].mlp.experts
    up, down = block.gate_up_proj.detach(), block.down_proj.detach()
    if family == "gpt_oss":
        up, down = torch.cat((up[..., ::2], up[..., 1::2]), dim=-1).transpose(1, 2), down.transpose(1, 2)
    for part, theirs in (("up", up), ("down", down)):
        name = f"layers.1.mlp.experts.{part}.weight"
        shape = folder.mapping[name].shape
        whole = folder.read(name, "weight", (0,) * len(shape), shape)
        assert torch.equal(whole, theirs.reshape(shape))
        for _ in range(20):
            ends = [sorted(generator.sample(range(n + 1), 2)) for n in shape]
            box = folder.read(name, "weight", tuple(a for a, _ in ends), tuple(b - a for a, b in ends))
            assert torch.equal(box, whole[tuple(slice(a, b) for a, b in ends)])


def test_a_bias_that_only_chooses_stays_float32(tmp_path: Path) -> None:
    """In an import, and in an export of a narrower dtype."""
    reference = hf.reference(hf.deepseek())
    source = HFFolder(hf.saved(reference, tmp_path / "source"))
    checkpoint = open_checkpoint(import_checkpoint(source.path, tmp_path / "ours", note=lambda _: None))
    export_hf(checkpoint, tmp_path / "back", dtype="bfloat16", note=lambda _: None)
    back, name = HFFolder(tmp_path / "back"), "layers.2.mlp.router.balance_bias"
    bias = reference.model.layers[2].mlp.gate.e_score_correction_bias
    assert not torch.equal(bias, bias.bfloat16().float())
    for read in (checkpoint.read, back.read):
        found = read(name, BUFFER, (0,), (8,))
        assert found.dtype == torch.float32 and torch.equal(found, bias)
    assert back.dtype("final_norm.weight") == torch.bfloat16


def upcycled(model: ModelConfig, **moe: Any) -> ModelConfig:
    """The model with experts in every other layer."""
    return replace(model, moe=MoEConfig(**{"num_experts": 4, "top_k": 3, "every": 2, "balance_bias": True, **moe}))


def test_an_upcycled_model_computes_what_the_dense_one_does(tmp_path: Path) -> None:
    """Exactly: each expert is the dense MLP, biases too, and the shares of a token's experts add up to one."""
    run_file = {"checkpoint.initial_weights": str(tmp_path / "step-00000012")}
    dense = replace(GPT2, num_layers=4, activation="swiglu", ffn_hidden_size=48)
    saved(tmp_path, dense, ("weight",))
    config = with_values(RunConfig(model=upcycled(dense), seed=5), run_file)
    plain, weights = open_initial(replace(config, model=dense)), open_initial(config)
    tokens = torch.arange(32).view(2, 16)
    with torch.no_grad():
        ours, theirs = (stage_of(each, dtype=torch.float64)(tokens) for each in (weights, plain))
    assert hf.relative(ours, theirs) < 1e-14
    router, shape = "layers.3.mlp.router.weight", (4, 32)
    drawn = initial_values(seed=5, name=router, init=InitSpec("normal", 0.02), shape=shape, offset=(0, 0), extent=shape)
    assert torch.equal(weights.read(router, "weight", (0, 0), shape), drawn)
    up = plain.read("layers.3.mlp.up.weight", "weight", (0, 0, 0), (2, 48, 32))
    part = weights.read("layers.3.mlp.experts.up.weight", "weight", (1, 1, 7, 2), (3, 1, 9, 5))
    assert torch.equal(part, up[1:, 7:16, 2:7].expand(3, 1, 9, 5))
    assert torch.equal(weights.read("layers.2.mlp.up.weight", "weight", (0, 0, 0), (2, 48, 32)),
                       plain.read("layers.2.mlp.up.weight", "weight", (0, 0, 0), (2, 48, 32)))
    for moe, message in (
        ({"normalize": False}, "moe.normalize is false; a token's shares must add up to 1"),
        ({"ffn_hidden_size": 24}, "moe.ffn_hidden_size is 24; it must be the dense width 48"),
        ({"scale": 2.0}, "moe.scale is 2.0"), ({"shared_ffn_hidden_size": 8}, "moe.shared_ffn_hidden_size is 8"),
    ):
        with pytest.raises(CheckpointError, match=f"that experts cannot begin as copies of: {message}"):
            open_initial(replace(config, model=upcycled(dense, **moe)))
    with pytest.raises(CheckpointError, match="copies of: hidden_size is 32 there and 64 here"):
        open_initial(replace(config, model=replace(config.model, hidden_size=64)))


@pytest.mark.parametrize("name", ["switch-base-8", "switch-base-128", "moe-tiny"])
def test_counts_of_shapes_without_a_family(name: str) -> None:
    """The comment on top; by hand, for Switch: table, 24 layers of attention, 12 dense MLPs, 12 of experts, norms."""
    found = load(f"models/{name}")
    said = re.search(r"([0-9,]{9,}) parameters", Path(found.files[-1]).read_text())
    assert said is not None and int(said[1].replace(",", "")) == parameter_count(found.config.model)
    h, f, experts = 768, 3072, found.config.model.moe.num_experts
    by_hand = 32128 * h + 24 * (4 * h * h + 2 * h) + 12 * (2 * h * f + experts * (2 * h * f + h)) + h
    assert not name.startswith("switch") or parameter_count(found.config.model) == by_hand


def test_deepseek_v3_has_14848_biases() -> None:
    shapes = buffer_shapes(load("models/deepseek-v3").config.model)
    assert sum(prod(shape) for shape in shapes.values()) == 14_848 and len(shapes) == 58


def test_experts_in_other_layers_than_every_nth_are_refused() -> None:
    body = hf.small("qwen3_moe", num_hidden_layers=6).to_dict()
    for dense, (first, every) in ([0, 1], (2, 1)), ([0, 2, 4], (0, 2)), ([0, 1, 3, 4], (0, 3)), ([0, 1, 2, 4], (2, 2)):
        moe = model_from_hf({**body, "mlp_only_layers": dense}, "config.json").moe
        assert (moe.first_dense, moe.every) == (first, every)
    with pytest.raises(CheckpointError, match=r"mlp_only_layers and decoder_sparse_step makes layers \[3\] of 6 dense"):
        model_from_hf({**body, "mlp_only_layers": [3]}, "config.json")
