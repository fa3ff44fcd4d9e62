"""Losses of policies on every kind of layout: in fp64 loss, gradients and sums are one process's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from cases import Batches, Reordering, make_batches, make_config, run_with_sums
from fuzz import plain
from pool import RankPool

from megatron_port.core.config.choices import with_sections
from megatron_port.core.config.model import MoEConfig
from megatron_port.core.config.schema import LayoutConfig, RunConfig, TrainingConfig
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.data.loader import RankView
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.ext.objectives.policy_settings import PolicyConfig
from megatron_port.ext.objectives.rollout_files import Rollout
from megatron_port.ext.objectives.rollout_source import labels_of
from megatron_port.tools.parity.comparison import FP64, Run, compare
from megatron_port.tools.parity.run_record import RankTrace

LLAMA = {"num_layers": 2, "activation": "swiglu", "normalization": "rmsnorm", "position_embedding": "rope",
         "add_bias": False, "tie_embeddings": False, "num_query_groups": 2, "ffn_hidden_size": 48}
GPT = {"hidden_dropout": 0.1, "num_layers": 4}
MOE = {**LLAMA, "moe": MoEConfig(num_experts=4, top_k=2)}
EVERYTHING = {"kl": 0.2, "entropy": 0.05, "correction": 1.2}
Sums = list[dict[str, float]]


Case = tuple[RunConfig, PolicyConfig]


def rewarded(model: dict[str, Any], policy: dict[str, Any], **layout: Any) -> Case:
    """A run on rollouts; its section apart, as a class that is made while a file is read cannot be sent to ranks."""
    config = make_config(dtype="fp64", model=model, layout=layout)
    return dataclasses.replace(config, training=TrainingConfig(loss="policy")), PolicyConfig(**policy)


def whole(case: Case) -> RunConfig:
    """The run with its section."""
    fields = {field.name: getattr(case[0], field.name) for field in dataclasses.fields(case[0])}
    made: RunConfig = with_sections(("policy",))(**fields, policy=case[1])  # type: ignore[call-arg]
    return made


LAYOUTS: dict[str, list[tuple[Case, Topology]]] = {
    "one axis": [
        (rewarded(GPT, {"method": "grpo", **EVERYTHING}, pipeline_schedule="zb-v", virtual_pipeline_size=2),
         Topology(pp=2)),
        (rewarded(LLAMA, {"method": "gspo", **EVERYTHING}, cp_method="ring"), Topology(cp=2)),
        (rewarded(LLAMA, {"method": "dapo", **EVERYTHING}, sequence_parallel=True, recompute="full"), Topology(tp=2)),
        (rewarded(LLAMA, {"method": "cispo", **EVERYTHING}, zero_stage=3), Topology(dp=2)),
        (rewarded(MOE, {"method": "dr_grpo", "kl": 0.1}, expert_parallel_size=2), Topology(dp=2, ep=2)),
    ],
    "two axes": [
        (rewarded(LLAMA, {"method": "gspo", "kl": 0.1}, zero_stage=2), Topology(cp=2, dp=2)),
        (rewarded(LLAMA, {"method": "grpo", **EVERYTHING}, sequence_parallel=True, cp_method="heads"),
         Topology(tp=2, cp=2)),
        (rewarded(GPT, {"method": "dapo", **EVERYTHING}, pipeline_schedule="zb-h1", sequence_parallel=True),
         Topology(tp=2, pp=2)),
        (rewarded(GPT, {"method": "dr_grpo", "old": "current"}, virtual_pipeline_size=2, zero_stage=1),
         Topology(pp=2, dp=2)),
    ],
    "three axes": [
        (rewarded(LLAMA, {"method": "ppo", **EVERYTHING}, sequence_parallel=True, zero_stage=1), Topology(2, 2, 2)),
        (rewarded(LLAMA, {"method": "gspo", **EVERYTHING}, sequence_parallel=True), Topology(tp=2, pp=2, cp=2)),
    ],
}
"""Of one number of ranks each."""


def rollout_of(sample: int) -> tuple[Rollout, float]:
    """A rollout and its advantage, of the sample's number alone. One in five answers nothing."""
    draw = np.random.default_rng(sample)
    length = int(draw.integers(6, 18))
    sampled = np.arange(length) >= int(draw.integers(1, 5))
    sampled[length // 2] &= draw.random() < 0.5
    if sample % 5 == 1:
        sampled[:] = False
    logprobs = -4.2 + 0.6 * draw.standard_normal(length)
    return Rollout(
        tokens=draw.integers(0, 53, length), sampled=sampled, logprobs=logprobs, reward=float(draw.random()), group=0,
        further={"ref_logprobs": logprobs + 0.3 * draw.standard_normal(length)}), float(draw.standard_normal())


def rollouts(config: RunConfig, ctx: ParallelContext, order: Reordering | None) -> Batches:
    """Rollouts on this rank, in the order of the batches of other tests."""
    batches, view = make_batches(config, ctx, order), RankView.on(config, ctx)

    def made(batch: MicroBatch) -> MicroBatch:
        rows = [labels_of(*rollout_of(k), 16) for k in batch.sample_ids]
        mask = torch.from_numpy(np.stack([row.counted for row in rows if row.counted is not None])).float()
        return view.micro_batch(batch.sample_ids, np.stack([row.tokens for row in rows]) if view.reads else None,
                                mask=mask, labels_masked=True, rows=rows, training=True)

    return lambda step: [made(batch) for batch in batches(step)]


def run_rollouts(cases: Sequence[tuple[Case, Topology]]) -> list[tuple[RankTrace, Sums]]:
    """Three steps of each case on this rank, with the sums of each step."""
    return run_with_sums([(whole(case), topology) for case, topology in cases], rollouts)


@pytest.mark.parametrize("axes", LAYOUTS)
def test_rollouts_train_as_on_one_process(ranks: RankPool, axes: str) -> None:
    cases = LAYOUTS[axes]
    results = ranks.run(cases[0][1].world_size, run_rollouts, cases, timeout=300)
    for number, ((config, policy), topology) in enumerate(cases):
        alone = dataclasses.replace(plain(config), layout=LayoutConfig(vocab_padding_multiple=1))
        (trace, sums), = run_rollouts([((alone, policy), Topology())])
        assert len({one["policy_ratio"] for one in sums}) == 3 and sums[1]["policy_answers"] > 4
        found = compare(
            Run.of([trace]), Run.of([result[number][0] for result in results]), FP64, config.model, lr=1e-2)
        assert not [str(d) for d in found if not d.ok], topology
        for _, theirs in (result[number] for result in results):
            assert all(a == pytest.approx(b, rel=1e-9, abs=1e-9) for a, b in zip(theirs, sums, strict=True))
