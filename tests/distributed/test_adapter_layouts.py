"""Low-rank adapters on every kind of layout: in fp64 each trains as one process does, and frozen weights stay."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from cases import make_config, run_cases, single_run
from fuzz import plain
from pool import RankPool

from megatron_port.core.config.features import FineTuningConfig, OffloadConfig
from megatron_port.core.config.schema import MoEConfig, RunConfig
from megatron_port.core.dist.mesh import Topology
from megatron_port.tools.parity.comparison import FP64, Run, compare

LLAMA = {
    "num_layers": 2, "activation": "swiglu", "normalization": "rmsnorm", "position_embedding": "rope",
    "add_bias": False, "tie_embeddings": False, "num_query_groups": 2, "ffn_hidden_size": 48, "hidden_dropout": 0.1,
}
GPT = {"hidden_dropout": 0.1, "num_layers": 4}
LORA: dict[str, Any] = {"method": "lora", "rank": 3, "dropout": 0.25}
LATENT = {
    **LLAMA, "num_query_groups": 0, "head_dim": 12, "kv_lora_rank": 20, "q_lora_rank": 14, "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}
DORA: dict[str, Any] = {"method": "dora", "rank": 3, "rslora": True, "targets": ("query", "value", "up", "down")}


MOE: dict[str, Any] = {**LLAMA, "moe": MoEConfig(
    num_experts=4, top_k=2, ffn_hidden_size=8, shared_ffn_hidden_size=16, first_dense=1, balance_loss="sequence",
    z_weight=0.01, capacity_factor=1.25,
)}
"""Adapters of attention, the dense layer and the shared block; router and experts are frozen."""
BIASED = {**MOE, "moe": dataclasses.replace(MOE["moe"], balance_bias=True, score="sigmoid", capacity_factor=0.0)}


def tuned(tuning: dict[str, Any], model: dict[str, Any], **layout: Any) -> RunConfig:
    """A run of these adapters."""
    config = make_config(dtype="fp64", model=model, layout=layout)
    return dataclasses.replace(config, fine_tuning=FineTuningConfig(**tuning))


LAYOUTS: dict[int, list[tuple[RunConfig, Topology]]] = {
    2: [
        (tuned(LORA, LLAMA, sequence_parallel=True, recompute="full"), Topology(tp=2)),
        (tuned({**LORA, "targets": ("query_down", "query_up", "kv_down", "kv_up")}, LATENT, sequence_parallel=True),
         Topology(tp=2)),
        (tuned({**DORA, "targets": ()}, LATENT), Topology(tp=2)),
        (tuned(DORA, LLAMA, zero_stage=3), Topology(dp=2)),
        (tuned(LORA, LLAMA, context_parallel_size=2), Topology(cp=2)),
        (tuned(LORA, GPT, pipeline_schedule="zb-v", virtual_pipeline_size=2), Topology(pp=2)),
        (tuned(LORA, MOE, sequence_parallel=True, expert_parallel_size=2), Topology(tp=2, ep=2)),
        (tuned(DORA, BIASED, zero_stage=3, expert_parallel_size=2, recompute="full"), Topology(dp=2, ep=2)),
    ],
    4: [
        # Each key and value on two ranks; the adapted products are not chunked, those of gate and output are.
        (tuned({**LORA, "targets": ("key", "value", "up")}, LLAMA, sequence_parallel=True, tp_overlap_chunks=2),
         Topology(tp=4)),
        (tuned(DORA, LLAMA), Topology(tp=4)),
        (tuned({**LORA, "targets": ("kv_down", "up")}, LATENT, zero_stage=2, sequence_parallel=True,
               context_parallel_size=2), Topology(tp=2, cp=2)),
        (tuned(DORA, GPT, sequence_parallel=True, pipeline_schedule="zb-h1", recompute="selective"),
         Topology(tp=2, pp=2)),
        (tuned(LORA, GPT, virtual_pipeline_size=2, zero_stage=3, reshard="step", reduce_bucket_size=200),
         Topology(pp=2, dp=2)),
        (tuned(LORA, LLAMA, zero_stage=0,
               recompute=("qkv+core+activation", "norm1+hidden+residual+input:partition")),
         Topology(tp=2, dp=2)),
        (tuned(LORA, {**MOE, "num_layers": 4}, expert_parallel_size=2, pipeline_schedule="zb-h1", zero_stage=1),
         Topology(pp=2, dp=2, ep=2)),
    ],
}
"""By number of ranks."""


@functools.lru_cache(maxsize=16)
def alone(config: RunConfig) -> Run:
    """Three steps on one process, with the gradients of each."""
    return single_run(config, steps=3, gradient_steps=3)


def differing(reference: Run, config: RunConfig, run: Run) -> list[str]:
    """What differs between a layout and one process beyond fp64's rounding."""
    found = compare(reference, run, FP64, config.model, lr=1e-2)
    return [str(d) for d in found if not d.ok]


@pytest.mark.parametrize("world", [2, *(pytest.param(w, marks=pytest.mark.slow) for w in LAYOUTS if w != 2)])
def test_adapters_train_as_on_one_process(ranks: RankPool, world: int) -> None:
    """The gradients of three steps: in the first that of A is zero, because B is."""
    cases = [(config, topology, 3, 3) for config, topology in LAYOUTS[world]]
    results = ranks.run(world, run_cases, cases, timeout=200)
    for number, (config, topology, *_) in enumerate(cases):
        reference = alone(plain(config))
        assert all(bool(g.any()) for g in reference.gradients[2].values())
        bad = differing(reference, config, Run.of([result[number] for result in results]))
        assert not bad, f"{topology}: {bad}"


def test_twenty_steps_on_every_axis_leave_frozen_weights_as_they_are(ranks: RankPool) -> None:
    config = tuned(LORA, LLAMA, sequence_parallel=True, zero_stage=1)
    reference = single_run(config, steps=20)
    run = Run.of([result[0] for result in ranks.run(8, run_cases, [(config, Topology(2, 2, 2), 20, 1)])])
    assert not differing(reference, config, run)
    begin = single_run(config, steps=1).weights
    trained = {name for name in begin if ".lora_" in name}
    assert trained and set(run.gradients[0]) == trained
    for name, weight in run.weights.items():
        assert torch.equal(weight, begin[name]) is (name not in trained), name


def test_offloaded_adapters_train_as_on_one_process(ranks: RankPool) -> None:
    """Frozen shards live on the host too; the state of adapters alone is offloaded."""
    config = dataclasses.replace(
        make_config(model=LLAMA, layout={"zero_stage": 3}, own_kernels="on"), fine_tuning=FineTuningConfig(**LORA),
        offload=OffloadConfig(optimizer="cpu", weights="cpu"),
    )
    run = Run.of([result[0] for result in ranks.run(2, run_cases, [(config, Topology(dp=2), 3, 1)])])
    assert run.losses == pytest.approx(single_run(config, steps=3).losses, rel=1e-5)
