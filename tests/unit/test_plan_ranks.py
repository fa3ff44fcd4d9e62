"""Bytes of real ranks, by the allocator's own events (torch's profiler on a CPU), against the planner: within 5 %."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_ranks import batches, fake_rank
from torch.profiler import ProfilerActivity, profile

from megatron_port.config.schema import (
    ActivationsConfig,
    BackendConfig,
    BatchConfig,
    DataConfig,
    LayoutConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
)
from megatron_port.optim.rules import ElementwiseRule
from megatron_port.parallel.record import ParameterRecord
from megatron_port.plan.case import Machine, case_of
from megatron_port.plan.memory import stage_memory
from megatron_port.registry import OPTIMIZERS
from megatron_port.session.assemble import topology_of
from megatron_port.session.dry_run import build_every_rank

GPT = {"num_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "vocab_size": 1000, "seq_length": 128}
LLAMA = {
    **GPT, "activation": "swiglu", "normalization": "rmsnorm", "position_embedding": "rope", "add_bias": False,
    "tie_embeddings": False, "num_query_groups": 2,
}
MODELS = {"gpt": GPT, "dropout": {**GPT, "hidden_dropout": 0.1}, "llama": LLAMA}


def held_bytes(engine: Any) -> int:
    """Bytes of the storages of a rank's weights, gradient sums, masters and optimizer state."""
    held = [t for b in engine.sharded.buckets for t in (b.weights, b.shard, b.sums, b.masters, *b.state.values())]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())


def padding(engine: Any) -> int:
    """Elements of padding in a rank's buckets."""
    return sum(b.plan.numel - sum(slot.numel for slot in b.plan.slots) for b in engine.sharded.buckets)


def peak(config: RunConfig, rank: int) -> tuple[int, int, int]:
    """Bytes that a rank holds between steps, the most that are allocated at once during one, and elements of padding
    in its buckets."""
    with fake_rank(config, rank, initialise=True) as (engine, ctx, resolved):
        mine = batches(resolved, ctx)
        engine.train_step(mine, step=0, lr=1e-3)  # the moments are made
        buckets = engine.sharded.buckets  # type: ignore[attr-defined]
        before = held_bytes(engine)
        pool = engine.sharded.grad_buffer_pool  # type: ignore[attr-defined]
        windows = sum(b.grad_buffer.nbytes for b in buckets if b.grad_buffer is not None)
        windows += 0 if pool is None else pool.made * pool.size * pool.dtype.itemsize
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as events:
            engine.train_step(mine, step=1, lr=1e-3)
        assert events.profiler is not None and events.profiler.kineto_results is not None
        changes = sorted(
            (e.start_ns(), e.nbytes()) for e in events.profiler.kineto_results.events() if e.name() == "[memory]"
        )
        now = most = 0
        for _, size in changes:
            now += size
            most = max(most, now)
        assert most > 0, "the profiler recorded no allocation"
        return before, before + windows + most, padding(engine)


P2, P4 = {"pipeline_parallel_size": 2}, {"pipeline_parallel_size": 4}
T2, SP = {"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "sequence_parallel": True}
ZERO1, ZERO2, ZERO3 = ({"data_parallel_size": 2, "zero_stage": stage} for stage in (1, 2, 3))
HYBRID = {"data_parallel_size": 4, "shard_size": 2, "zero_stage": 1}
FULL, SELECTIVE, GPIPE = {"recompute": "full"}, {"recompute": "selective"}, {"pipeline_schedule": "gpipe"}
CASES = [
    ("gpt", "fp32", {}, 0), ("llama", "fp32", {}, 0), ("dropout", "bf16", {}, 0), ("gpt", "fp32", FULL, 0),
    ("llama", "bf16", FULL, 0), ("gpt", "fp32", SELECTIVE, 0), ("llama", "fp32", SELECTIVE, 0),
    ("gpt", "fp32", P2, 0), ("gpt", "bf16", P2, 1), ("gpt", "fp32", P4, 1), ("dropout", "fp32", P4, 0),
    ("llama", "bf16", P4, 3), ("gpt", "fp32", {**P4, **FULL}, 0), ("llama", "fp32", {**P4, **FULL}, 3),
    ("gpt", "fp32", {**P2, **GPIPE}, 0), ("llama", "fp32", {**P2, **GPIPE}, 1), ("gpt", "fp32", T2, 0),
    ("llama", "bf16", T2, 0), ("gpt", "fp32", SP, 0), ("llama", "fp32", {**SP, **FULL}, 0),
    ("gpt", "bf16", {**SP, **P2, "data_parallel_size": 2}, 0), ("dropout", "fp32", {**SP, **P2}, 1),
    ("gpt", "bf16", ZERO1, 0), ("llama", "bf16", {**ZERO2, **P2}, 1), ("gpt", "fp32", {**ZERO2, **SP, **P2}, 0),
    ("llama", "fp32", {**ZERO2, "reduce_bucket_size": 100_000}, 0),
    ("gpt", "bf16", HYBRID, 0), ("llama", "fp32", {**HYBRID, "zero_stage": 2, **P2}, 1),
    ("gpt", "fp32", {**HYBRID, "shard_size": 1}, 0),
    ("gpt", "bf16", ZERO3, 0), ("llama", "fp32", {**ZERO3, **P2}, 1), ("gpt", "bf16", {**ZERO3, **FULL}, 0),
]


class Momentum(ElementwiseRule):
    """One tensor of state, as Lion has; with ``second`` weights, which every bucket has, have another."""

    def __init__(self, *, second: bool) -> None:
        self.second = second

    def kinds(self, record: ParameterRecord) -> tuple[str, ...]:
        return ("momentum", "second") if self.second and record.name.endswith("weight") else ("momentum",)

    def update_(self, master: torch.Tensor, *_: Any) -> None:
        """Change nothing."""


def run_of(model: str, dtype: str, layout: dict) -> RunConfig:
    base = {"zero_stage": 0, "vocab_padding_multiple": 8, "data_parallel_size": 1}
    layout = dict(layout)
    policy = layout.pop("recompute", "none")
    return RunConfig(
        model=ModelConfig(**MODELS[model]), layout=LayoutConfig(**{**base, **layout}),
        activations=ActivationsConfig(policy=policy),
        batch=BatchConfig(micro_batch_size=2, global_batch_size=8), precision=PrecisionConfig(dtype=dtype),
        data=DataConfig(synthetic=True), engine="native", backend=BackendConfig(device="cpu", attention="math"),
    )


@pytest.mark.parametrize(("model", "dtype", "layout", "stage"), CASES)
def test_memory_of_a_rank(model: str, dtype: str, layout: dict, stage: int) -> None:
    torch.set_num_threads(1)
    config = run_of(model, dtype, layout)
    case, _ = case_of(config)
    planned = stage_memory(case, Machine(cluster=config.cluster, hardware=config.hardware), stage)
    before, most, padded = peak(config, stage * case.dp * case.tp)
    assert planned.static * (planned.elements + padded) == before * planned.elements
    assert planned.allocated == pytest.approx(most, rel=0.05)


@pytest.mark.parametrize("layout", [{}, HYBRID], ids=["alone", "hybrid"])
@pytest.mark.parametrize(("second", "state"), [(False, 1), (True, 2)])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_state_is_what_the_rule_keeps(
    dtype: str, second: bool, state: int, layout: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a rule with one tensor per parameter 8 bytes with the master, not 12; a dry run counts the same bytes."""
    monkeypatch.setitem(OPTIMIZERS._added, "momentum", Momentum(second=second))
    config = replace(run_of("gpt", dtype, layout), optimizer=OptimizerConfig(name="momentum"))
    case, _ = case_of(config)
    planned = stage_memory(case, Machine(cluster=config.cluster, hardware=config.hardware), 0)
    shards = 2 if layout else 1
    assert planned.optimizer == (state + (dtype == "bf16")) * 4 * planned.elements / shards
    with fake_rank(config, 0) as (engine, _, _):
        assert planned.static * (planned.elements + padding(engine)) == held_bytes(engine) * planned.elements
    (stage,) = build_every_rank(config, topology_of(config))
    assert stage.static_bytes == planned.static
