"""Pairs of answers on every kind of layout: in fp64 loss, gradients, rewards and the reference are one process's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import Batches, Reordering, make_batches, make_config, providers_of, run_with_sums
from fuzz import plain
from pool import RankPool

from megatron_port.core.config.features import FineTuningConfig
from megatron_port.core.config.schema import LayoutConfig, RunConfig, TrainingConfig
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.data.indexed import CorpusMeta, IndexedDataset
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.ext.corpora.writer import IndexedWriter
from megatron_port.run.build import build_engine
from megatron_port.tools.inference.model import WholeDocuments, log_probabilities
from megatron_port.tools.parity.comparison import FP64, Run, compare
from megatron_port.tools.parity.run_record import RankTrace

LLAMA = {"num_layers": 2, "activation": "swiglu", "normalization": "rmsnorm", "position_embedding": "rope",
         "add_bias": False, "tie_embeddings": False, "num_query_groups": 2, "ffn_hidden_size": 48}
GPT = {"hidden_dropout": 0.1, "num_layers": 4}
Rewards = list[dict[str, float]]


def preferring(model: dict[str, Any], *, tuning: str = "none", loss: str = "dpo", **layout: Any) -> RunConfig:
    """A run on pairs."""
    config = make_config(dtype="fp64", model=model, layout=layout, data={
        "attention_documents": "within", "position_reset": model.get("position_embedding") != "rope"})
    tuned: Any = {"method": tuning, "rank": 3} if tuning != "none" else {}
    return dataclasses.replace(
        config, training=TrainingConfig(loss=loss, dpo_beta=0.4), fine_tuning=FineTuningConfig(**tuned))


LAYOUTS: dict[str, list[tuple[RunConfig, Topology]]] = {
    "pp": [(preferring(GPT, pipeline_schedule="zb-v", virtual_pipeline_size=2), Topology(pp=2))],
    "one axis": [
        (preferring(LLAMA, sequence_parallel=True, recompute="full"), Topology(tp=2)),
        (preferring(LLAMA, zero_stage=3), Topology(dp=2)),
    ],
    "two axes": [
        (preferring(GPT, sequence_parallel=True, pipeline_schedule="zb-h1"), Topology(tp=2, pp=2)),
        (preferring(LLAMA, tuning="dora", zero_stage=2), Topology(tp=2, dp=2)),
        (preferring(GPT, virtual_pipeline_size=2, zero_stage=1), Topology(pp=2, dp=2)),
    ],
    "three axes": [
        (preferring(LLAMA, tuning="lora", sequence_parallel=True, zero_stage=1), Topology(2, 2, 2)),
        (preferring(LLAMA, loss="orpo", sequence_parallel=True, zero_stage=1), Topology(2, 2, 2)),
    ],
}
"""Of one number of ranks each."""


def paired(batch: MicroBatch) -> MicroBatch:
    """The batch with two documents in each sample, answers that count and what a reference gave: of the samples' ids
    alone. The last positions are padding."""
    rows, masks, references = [], [], []
    for sample in batch.sample_ids:
        drawn = torch.Generator().manual_seed(sample)
        edge, end = 5 + sample % 6, 15
        starts = torch.zeros(16, dtype=torch.int32)
        starts[edge:], starts[end:] = edge, end
        mask = (torch.rand(16, generator=drawn) < 0.6).float()
        mask[[1, edge + 1]], mask[[edge - 1, end - 1, end]] = 1.0, 0.0
        rows.append(starts)
        masks.append(mask)
        references.append(-12.0 - 8.0 * torch.rand(2, generator=drawn, dtype=torch.float64))
    last = batch.labels is not None
    return dataclasses.replace(
        batch, document_starts=torch.stack(rows), loss_mask=torch.stack(masks) if last else None, labels_masked=True,
        side={"reference": torch.stack(references)} if last else {},
    )


def pairs(config: RunConfig, ctx: ParallelContext, order: Reordering | None) -> Batches:
    """Pairs on this rank."""
    batches = make_batches(config, ctx, order)
    return lambda step: [paired(batch) for batch in batches(step)]


def run_pairs(cases: Sequence[tuple[RunConfig, Topology]]) -> list[tuple[RankTrace, Rewards]]:
    """Three steps of each case on this rank, with the sums of each step."""
    return run_with_sums(cases, pairs)


@pytest.mark.parametrize("axes", [
    "pp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("one axis", "two axes")), "three axes"
])
def test_pairs_train_as_on_one_process(ranks: RankPool, axes: str) -> None:
    cases = LAYOUTS[axes]
    results = ranks.run(cases[0][1].world_size, run_pairs, cases, timeout=200)
    for number, (config, topology) in enumerate(cases):
        alone = dataclasses.replace(plain(config), layout=LayoutConfig(vocab_padding_multiple=1))
        (trace, rewards), = run_pairs([(alone, Topology())])
        margin = "reward_margin" if config.training.loss == "dpo" else "log_odds_ratio"
        assert len({abs(r[margin]) for r in rewards}) == 3 and 0 < rewards[0]["reward_accuracy"] < 8
        found = compare(
            Run.of([trace]), Run.of([result[number][0] for result in results]), FP64, config.model, lr=1e-2)
        assert not [str(d) for d in found if not d.ok], topology
        for _, theirs in (result[number] for result in results):
            assert all(a == pytest.approx(b, rel=1e-5, abs=1e-5) for a, b in zip(theirs, rewards, strict=True))


def reference_of(config: RunConfig, topology: Topology, prefix: str) -> np.ndarray:
    """Log-probabilities of a corpus by the initial weights, on this rank."""
    ctx = ParallelContext.create(dataclasses.replace(topology, kv_copies=1), "cpu")
    try:
        config = dataclasses.replace(config, training=TrainingConfig())
        engine = build_engine(config, ctx, providers_of(config))
        return log_probabilities(engine, ctx, WholeDocuments(IndexedDataset(prefix), 16, config.model.vocab_size))
    finally:
        ctx.close()


def test_the_reference_is_the_same_on_every_layout(ranks: RankPool, tmp_path: Path) -> None:
    """Of five documents on two replicas; the last stage's, of any tensor-parallel rank."""
    drawn = np.random.default_rng(3)
    with IndexedWriter(tmp_path / "c", vocab_size=53, masked=True) as writer:
        lengths = np.array([4, 16, 17, 9, 6], "<i4")
        counted = (drawn.random(lengths.sum()) < 0.7).tobytes()
        writer.add_block(lengths, drawn.integers(0, 53, lengths.sum()).astype("<u2").tobytes(), counted)
        writer.describe(CorpusMeta(tokenizer="byte", vocab_size=53, eod_id=-1))
    config, topology = preferring(LLAMA), Topology(2, 2, 2)
    alone = reference_of(config, Topology(), str(tmp_path / "c"))
    assert (alone < -4).all() and len(set(alone)) == 5
    for found in ranks.run(8, reference_of, config, topology, str(tmp_path / "c")):
        np.testing.assert_allclose(found, alone, rtol=1e-12)
