"""Masks: torch's own pruners', the same on any slice, and training that keeps what they leave out at zero."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import gpt2
from torch.ao.pruning import WeightNormSparsifier
from torch.nn.utils import prune
from transformers import AutoModelForCausalLM

from megatron_port.core.config.checks import problems
from megatron_port.core.config.schema import (
    BackendConfig,
    BatchConfig,
    DataConfig,
    MoEConfig,
    OptimizerConfig,
    PrecisionConfig,
    QuantisationConfig,
    RunConfig,
    SparsityConfig,
)
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.record import WEIGHT
from megatron_port.core.layers.providers import torch_providers
from megatron_port.core.model.shapes import parameter_shapes
from megatron_port.ext.weights.readers import SparseWeights
from megatron_port.ext.weights.settings import is_sparse
from megatron_port.run.build import build_engine
from megatron_port.tools.interop.hf_files import HFFolder

NAME, OTHER = "layers.0.mlp.down.weight", "layers.0.mlp.experts.up.weight"
TWO_FOUR, SHARE = SparsityConfig(method="2:4"), SparsityConfig(method="magnitude", ratio=0.37)


def reader(sparsity: SparsityConfig, **tensors: torch.Tensor) -> SparseWeights:
    """Of tensors by a name's last part but one."""
    named = {NAME: tensors.get("down"), OTHER: tensors.get("up")}

    def read(name: str, kind: str, offset: Any, shape: Any, /, *, out: Any = None) -> torch.Tensor:
        whole = named[name]
        assert whole is not None
        return whole[tuple(slice(o, o + n) for o, n in zip(offset, shape))]

    return SparseWeights(sparsity, {name: tuple(t.shape) for name, t in named.items() if t is not None}, read)


def whole(read: SparseWeights, name: str) -> torch.Tensor:
    shape = read.shapes[name]
    return read(name, WEIGHT, (0,) * len(shape), shape)


def theirs(x: torch.Tensor, sparsity: SparsityConfig) -> torch.Tensor:
    """torch's mask of a matrix [outputs, inputs]."""
    layer = torch.nn.Linear(x.shape[1], x.shape[0], bias=False, dtype=x.dtype)
    with torch.no_grad():
        layer.weight.copy_(x)
    if sparsity.method == "magnitude":
        prune.l1_unstructured(layer, "weight", amount=sparsity.ratio)
        mask: torch.Tensor = layer.weight_mask  # type: ignore[assignment]
        return mask
    pruner = WeightNormSparsifier(sparsity_level=1.0, sparse_block_shape=(1, 4), zeros_per_block=2)
    pruner.prepare(torch.nn.Sequential(layer), [{"tensor_fqn": "0.weight"}])
    pruner.step()
    return layer.parametrizations.weight[0].mask  # type: ignore[index, union-attr, return-value]


@pytest.mark.parametrize("sparsity", [TWO_FOUR, SHARE], ids=["2:4", "share"])
def test_masks_are_torchs(sparsity: SparsityConfig) -> None:
    """The number of zeros too, rounded to the nearest: 0.37 of 96 elements are 35.52, so 36."""
    x = torch.randn(24, 36, generator=torch.Generator().manual_seed(2))
    found = whole(reader(sparsity, down=x), NAME)
    assert torch.equal(found, x * theirs(x, sparsity))
    packed = torch.randn(3, 2, 8, 12)  # each matrix of each expert by itself
    found = whole(reader(sparsity, up=packed), OTHER)
    for e in range(3):
        for part in range(2):
            assert torch.equal(found[e, part], packed[e, part] * theirs(packed[e, part], sparsity))


@pytest.mark.parametrize("sparsity", [TWO_FOUR, SHARE], ids=["2:4", "share"])
def test_a_slice_has_the_zeros_of_the_whole(sparsity: SparsityConfig) -> None:
    """Slices that cut groups, and values of which many are equal."""
    g = torch.Generator().manual_seed(4)
    x = torch.randint(-3, 4, (2, 2, 9, 20), generator=g).float()
    read = reader(sparsity, up=x)
    kept = whole(read, OTHER)
    for _ in range(60):
        offset = tuple(int(torch.randint(0, n, (), generator=g)) for n in x.shape)
        shape = tuple(int(torch.randint(1, n - o + 1, (), generator=g)) for n, o in zip(x.shape, offset))
        box = tuple(slice(o, o + n) for o, n in zip(offset, shape))
        assert torch.equal(reader(sparsity, up=x)(OTHER, WEIGHT, offset, shape), kept[box])
    if sparsity is SHARE:
        constant = whole(reader(sparsity, down=torch.ones(10, 10)), NAME)
        assert int((constant == 0).sum()) == 37


def saved(folder: Path) -> Any:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(gpt2(12, n_layer=2)).double()
    model.save_pretrained(folder)
    return model


def run_of(folder: Path, sparsity: SparsityConfig, **changes: Any) -> RunConfig:
    return RunConfig(**{
        "engine": "native", "model": HFFolder(folder).model, "precision": PrecisionConfig(dtype="fp64"),
        "batch": BatchConfig(micro_batch_size=2, global_batch_size=2), "data": DataConfig(synthetic=True),
        "optimizer": OptimizerConfig(lr=1e-2, clip_grad=0.3, weight_decay=0.0),
        "backend": BackendConfig(device="cpu", attention="math"), "sparsity": sparsity, **changes,
    })


@pytest.mark.parametrize("sparsity", [TWO_FOUR, SHARE], ids=["2:4", "share"])
def test_training_is_that_of_masked_weights_in_plain_torch(tmp_path: Path, sparsity: SparsityConfig) -> None:
    """Losses and norms of four steps: transformers' GPT-2, torch's masks, torch's clipping and AdamW."""
    model, config = saved(tmp_path), run_of(tmp_path, sparsity)
    engine = build_engine(config, ParallelContext.single(), torch_providers(), initialise=False)
    engine.load_weights(SparseWeights(sparsity, parameter_shapes(config.model), HFFolder(tmp_path).read))
    linears = [m for block in model.transformer.h for m in (
        block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj)]
    for linear in linears:  # Conv1D: [inputs, outputs]
        prune.custom_from_mask(linear, "weight", theirs(linear.weight.detach().t().float(), sparsity).t())
    o = config.optimizer
    adamw = torch.optim.AdamW(model.parameters(), lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=0.0)
    g = torch.Generator().manual_seed(9)
    for step in range(4):
        tokens = torch.randint(0, 101, (2, 13), generator=g)
        batch = MicroBatch((2 * step, 2 * step + 1), tokens[:, :-1], tokens[:, 1:])
        result = engine.train_step([batch], step=step, lr=o.lr)
        logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        adamw.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip_grad)
        adamw.step()
        assert result.loss == pytest.approx(loss.item(), rel=1e-9)
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-6)  # of torch's clipping factor's eps
    for record, parameter in engine.named_parameters():
        zeros = int((parameter == 0).sum())
        wanted = math.prod(record.shape) // 2 if sparsity is TWO_FOUR else round(0.37 * math.prod(record.shape))
        assert zeros == wanted if is_sparse(sparsity, record.name) else zeros < wanted


def test_settings_that_contradict_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    base = run_of(tmp_path, TWO_FOUR)
    assert not problems(base)
    for changed, words in (
        (dataclasses.replace(base, engine="deepspeed"), 'engine "deepspeed"'),
        (dataclasses.replace(base, optimizer=OptimizerConfig(name="muon")), "optimizer.name 'muon'"),
        (dataclasses.replace(base, model=dataclasses.replace(base.model, ffn_hidden_size=50)), "50 inputs"),
        (dataclasses.replace(base, sparsity=SparsityConfig(ratio=0.2)), "leaves nothing out"),
        (dataclasses.replace(base, quantisation=QuantisationConfig(weights="binary", group_size=4)), "has no zero"),
        (dataclasses.replace(base, model=dataclasses.replace(base.model, up_rank=6)), "up_rank) has 6 inputs"),
    ):
        assert any(words in problem for problem in problems(changed)), words


def test_targets_are_the_layers_matrices_without_routers() -> None:
    model = dataclasses.replace(RunConfig().model, num_layers=1, qk_norm=True, moe=MoEConfig(
        num_experts=4, shared_ffn_hidden_size=8))
    assert [name for name in parameter_shapes(model) if is_sparse(TWO_FOUR, name)] == [
        "layers.0.attention.qkv.weight", "layers.0.attention.output.weight", "layers.0.mlp.experts.up.weight",
        "layers.0.mlp.experts.down.weight", "layers.0.mlp.shared.up.weight", "layers.0.mlp.shared.down.weight",
    ]
    both = dataclasses.replace(RunConfig().model, num_layers=1, output_rank=8, up_rank=8, down_rank=8)
    assert [name.split(".")[3] for name in parameter_shapes(both) if is_sparse(TWO_FOUR, name)] == [
        "qkv", "output_low", "output", "up_low", "up", "down_low", "down",
    ]
    some = SparsityConfig(method="2:4", targets=("layers.*.mlp.*",))
    assert is_sparse(some, "layers.3.mlp.up.weight") and not is_sparse(some, "layers.3.attention.qkv.weight")
