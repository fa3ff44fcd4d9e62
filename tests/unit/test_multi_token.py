"""Multi-token prediction on one process against plain torch: losses of each depth, and the gradient of every weight.

Published implementations lost a part of this loss in silence: divided by the model's count of labels (Megatron-LM
#3159), not divided at all (#1532), read across packed documents (#4495).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from twin.model import Shape, Weights, activated, attention, no_dropout, normed, parameters_of, product

from megatron_port.core.config.checks import check
from megatron_port.core.config.schema import (
    BackendConfig,
    BatchConfig,
    DataConfig,
    LayoutConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
)
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.record import ParameterRecord
from megatron_port.core.engine.native import NativeEngine
from megatron_port.core.errors import ConfigError
from megatron_port.core.layers.embedding import VocabParallelEmbedding
from megatron_port.core.layers.linear import WgradAccumulator
from megatron_port.core.layers.providers import torch_providers
from megatron_port.ext.telemetry.flops import model_flops, parameter_count
from megatron_port.run.build import build_engine

SEQ, VOCAB, WEIGHT = 8, 31, 0.7
MODEL: dict[str, Any] = {
    "num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "num_query_groups": 1, "ffn_hidden_size": 24,
    "vocab_size": VOCAB, "seq_length": SEQ, "position_embedding": "rope", "normalization": "rmsnorm",
    "activation": "swiglu", "add_bias": False, "tie_embeddings": False, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "init_std": 0.3, "norm_epsilon": 1e-5,
}
Starts = torch.Tensor | None


def config_of(depths: int, *, within: bool = False, **model: Any) -> RunConfig:
    return RunConfig(
        engine="native", model=ModelConfig(**MODEL | model, mtp_layers=depths, mtp_weight=WEIGHT),
        layout=LayoutConfig(vocab_padding_multiple=1), batch=BatchConfig(micro_batch_size=2, global_batch_size=4),
        precision=PrecisionConfig(dtype="fp64"), optimizer=OptimizerConfig(lr=1e-2, clip_grad=0.0),
        backend=BackendConfig(device="cpu", attention="math", own_kernels="off"),
        data=DataConfig(synthetic=True, attention_documents="within" if within else "across"),
    )


def block(x: torch.Tensor, w: Weights, name: str, m: Shape, starts: Starts) -> torch.Tensor:
    y = attention(normed(x, w, f"{name}.norm1", m), w, name, m, no_dropout, starts)
    x = x + product(y, w, f"{name}.attention.output")
    y = activated(product(normed(x, w, f"{name}.norm2", m), w, f"{name}.mlp.up"), m.activation)
    return x + product(y, w, f"{name}.mlp.down")


def plain_losses(
    tokens: torch.Tensor, mask: torch.Tensor, starts: Starts, w: Weights, m: Shape, depths: int
) -> list[torch.Tensor]:
    """Mean loss of the model and of each depth over the labels that count, by loops over depths, samples and positions.

    ``tokens`` [samples, seq + 1].
    """
    targets, keeps = tokens[:, 1:].tolist(), mask.tolist()
    documents = [[0] * SEQ] * len(targets) if starts is None else starts.tolist()
    table = w["embedding.word.weight"]
    head = table if m.tie_embeddings else w["head.weight"]
    x = table[tokens[:, :-1]]
    for i in range(m.num_layers):
        x = block(x, w, f"layers.{i}", m, starts)
    hidden, out = normed(x, w, "final_norm", m), []
    for depth in range(depths + 1):
        if depth:
            name = f"mtp.{depth - 1}"
            # Beyond the sample any token will do: nothing that counts reads it.
            further = F.pad(tokens, (0, depth), value=VOCAB - 1)[:, depth : depth + SEQ]
            both = (normed(table[further], w, f"{name}.embedding_norm", m), normed(hidden, w, f"{name}.hidden_norm", m))
            x = block(torch.cat(both, -1) @ w[f"{name}.projection.weight"].t(), w, f"{name}.layer", m, starts)
            hidden = normed(x, w, f"{name}.norm", m)
        counted = [
            (sample, place, targets[sample][place + depth]) for sample in range(len(targets))
            for place in range(SEQ - depth)
            if keeps[sample][place + depth] and documents[sample][place] == documents[sample][place + depth]
        ]
        logs = (hidden @ head.t()).log_softmax(-1)
        index = torch.tensor(counted, dtype=torch.int64).view(-1, 3).unbind(1)
        out.append(-logs[index].sum() / max(len(counted), 1))
    return out


def masks() -> dict[str, torch.Tensor]:
    """Of four samples."""
    drawn = torch.rand(4, SEQ, generator=torch.Generator().manual_seed(5))
    place, ones = torch.arange(SEQ).expand(4, SEQ), torch.ones(4, SEQ)
    return {
        "all": ones, "half": (drawn < 0.5) * ones, "few": (drawn < 0.15) * ones,
        "last alone": (place == SEQ - 1) * ones,
        "first alone": (place == 0) * ones, "one micro-batch without any": ones * (torch.arange(4) > 1)[:, None],
        "none": 0 * ones,
    }


STARTS = torch.tensor([[0, 0, 2, 2, 2, 5, 5, 7], list(range(SEQ)), [0] * SEQ, [0, 1, 1, 1, 1, 1, 1, 7]]).int()
"""Documents of every length from one token on, with edges at both ends."""


@pytest.mark.parametrize(("depths", "tied"), [(1, True), (3, False)])
def test_every_depth_has_the_mean_of_its_own_tokens(depths: int, tied: bool) -> None:
    """Seven masks, each with samples of one document and of several."""
    for within in (False, True):
        config = config_of(depths, within=within, tie_embeddings=tied)
        check(config)
        engine = build_engine(config, ParallelContext.single(), torch_providers())
        assert isinstance(engine, NativeEngine)
        for number, (name, mask) in enumerate(masks().items()):
            differ = _differences(engine, config, mask, STARTS if within else None, number, name)
            assert not differ, (name, within, differ)


def _differences(
    engine: NativeEngine, config: RunConfig, mask: torch.Tensor, starts: Starts, number: int, name: str
) -> dict[str, float]:
    """What a step has otherwise than plain torch, by more than rounding."""
    depths = config.model.mtp_layers
    tokens = torch.randint(0, VOCAB, (4, SEQ + 1), generator=torch.Generator().manual_seed(number))
    given = None if name == "all" else mask.float()
    batches = [
        MicroBatch(
            (2 * i, 2 * i + 1), tokens[rows, :-1], tokens[rows, 1:], None if given is None else given[rows],
            labels_masked=given is not None, document_starts=None if starts is None else starts[rows],
        )
        for i, rows in enumerate((slice(0, 2), slice(2, 4)))
    ]
    weights = {r.name: p.detach().clone().requires_grad_() for r, p in engine.named_parameters()}
    found: list[tuple[ParameterRecord, torch.Tensor]] = []
    engine.on_gradients = found.extend
    result = engine.train_step(batches, step=number, lr=0.0)
    shape = parameters_of(MODEL | {"tie_embeddings": config.model.tie_embeddings})
    losses = plain_losses(tokens, mask, starts, weights, shape, depths)
    (losses[0] + WEIGHT * torch.stack(losses[1:]).mean()).backward()
    want_losses = [float(loss.detach()) for loss in losses]
    told = [result.loss, *(result.auxiliary[f"mtp_loss_{d}"] for d in range(1, depths + 1))]
    bounds = [1e-12, *[1e-6] * depths]  # sums of auxiliary values are float32
    out = {
        f"loss {d}": abs(ours - want) for d, (ours, want, bound) in enumerate(zip(told, want_losses, bounds))
        if not abs(ours - want) <= bound
    }
    assert {r.name for r, _ in found} == set(weights)
    for record, gradient in found:
        want = weights[record.name].grad
        far = float((gradient - (0.0 if want is None else want)).abs().max())
        out |= {} if far <= 1e-12 else {record.name: far}
    return out


def test_evaluation_and_counts_know_what_training_adds() -> None:
    """An evaluation has the model's own loss; parameters and operations include the modules."""
    with_two, without = config_of(2), config_of(0)
    engines = [build_engine(c, ParallelContext.single(), torch_providers()) for c in (with_two, without)]
    tokens = torch.randint(0, VOCAB, (2, SEQ + 1), generator=torch.Generator().manual_seed(3))
    batch = MicroBatch((0, 1), tokens[:, :-1], tokens[:, 1:])
    ours, plain = (engine.eval_step([batch]) for engine in engines)
    assert ours.loss_sum == plain.loss_sum and ours.tokens == plain.tokens
    held = [sum(p.numel() for _, p in engine.named_parameters()) for engine in engines]
    assert held == [parameter_count(with_two.model), parameter_count(without.model)]
    # h = 16, 2 heads of 8 with one key/value head, MLP of 24: each module has a projection, a layer, and logits.
    matrices = 2 * 16 * 16 + (16 * 32 + 16 * 16 + 3 * 16 * 24) + 16 * VOCAB
    scores = 4 * SEQ * SEQ * 16
    assert model_flops(with_two.model) - model_flops(without.model) == 3 * 2 * (2 * SEQ * matrices + scores)


def test_each_use_of_a_table_is_added_to_its_wide_sum() -> None:
    """1 + 2⁻⁹ is no bf16 number; what autograd adds up before the engine sees it would be 1."""
    weight, wide = torch.nn.Parameter(torch.zeros(5, 2, dtype=torch.bfloat16)), torch.zeros(5, 2)
    weight.wgrad_accumulator = WgradAccumulator(lambda w: None, lambda w: wide)  # type: ignore[attr-defined]
    rows = VocabParallelEmbedding(weight, ctx=ParallelContext.single(), sequence_parallel=False)
    for step in (1.0, 2.0**-9):
        rows(torch.tensor([[3], [1], [3]])).backward(torch.full((3, 1, 2), step, dtype=torch.bfloat16))
    assert weight.grad is None and wide[:, 0].tolist() == [0.0, 1 + 2.0**-9, 0.0, 2 + 2.0**-8, 0.0]


@pytest.mark.parametrize(("change", "words"), [
    ({"engine": "deepspeed"}, "engine \"deepspeed\""),
    ({"model": ModelConfig(**MODEL | {"position_embedding": "learned"}, mtp_layers=1)}, "position_embedding"),
    ({"model": ModelConfig(**MODEL, mtp_layers=SEQ)}, f"use at least {SEQ + 1}"),
])
def test_what_cannot_serve_it_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(replace(config_of(1), **change))
