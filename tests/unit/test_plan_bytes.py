"""Bytes on the wire: what the planner says, what a real rank hands to torch.distributed, what the seconds stand for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake_ranks import Traffic, batches, fake_rank
from planned_traffic import NORM, SUMS, pass_traffic, step_traffic

from megatron_port.core.config.loader import load
from megatron_port.core.config.model import MoEConfig, RecurrentConfig
from megatron_port.core.config.schema import (
    ActivationsConfig,
    BatchConfig,
    DataConfig,
    LayoutConfig,
    ModelConfig,
    NumericsConfig,
    PrecisionConfig,
    RunConfig,
)
from megatron_port.core.dist.mesh import Mesh
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.optim.buckets import Bucket
from megatron_port.core.optim.rules import ALIGN
from megatron_port.tools.plan.case import Machine, case_of, machine_of
from megatron_port.tools.plan.elements import bucket_elements, stage_elements
from megatron_port.tools.plan.engines import ENGINES
from megatron_port.tools.plan.layer import head_cost, layer_cost
from megatron_port.tools.plan.rates import Cost, Links, Rates, span
from megatron_port.tools.plan.step import chunk_costs, data_seconds

GPT = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 100, "seq_length": 16}
LLAMA = {
    **GPT, "activation": "swiglu", "normalization": "rmsnorm", "position_embedding": "rope", "add_bias": False,
    "tie_embeddings": False, "num_query_groups": 2,
}
ROUTED = {**LLAMA, "moe": MoEConfig(
    num_experts=8, ffn_hidden_size=16, shared_ffn_hidden_size=24, first_dense=1, every=2, balance_loss="sequence",
)}


def run(model: dict[str, Any], dtype: Any = "bf16", recompute: Any = "none", **layout: Any) -> RunConfig:
    base = {"vocab_padding_multiple": 8, "data_parallel_size": 1}
    return RunConfig(
        model=ModelConfig(**model), layout=LayoutConfig(**{**base, **layout}),
        activations=ActivationsConfig(policy=recompute),
        batch=BatchConfig(micro_batch_size=2, global_batch_size=8), precision=PrecisionConfig(dtype=dtype),
        data=DataConfig(synthetic=True), engine="native",
        numerics=NumericsConfig(state_check_interval=0),  # whose checksums of gradients are reduced at some steps
    )


LAYOUTS: list[dict[str, Any]] = [
    {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 4}, {"data_parallel_size": 4},
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 2},
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "recompute": "full"},
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "recompute": "selective", "pipeline_schedule": "gpipe"},
    {"tensor_parallel_size": 2, "sequence_parallel": True, "pipeline_parallel_size": 3, "data_parallel_size": 2},
    {"tensor_parallel_size": 2, "sequence_parallel": True, "pipeline_parallel_size": 2, "recompute": "full"},
    {"data_parallel_size": 4, "zero_stage": 0},
    {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2, "data_parallel_size": 2},
    {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2, "pipeline_schedule": "zb-v", "data_parallel_size": 2},
    {"tensor_parallel_size": 2, "sequence_parallel": True, "pipeline_parallel_size": 2, "data_parallel_size": 2,
     "zero_stage": 2},
    {"data_parallel_size": 4, "shard_size": 2}, {"data_parallel_size": 4, "shard_size": 1},
    {"tensor_parallel_size": 2, "sequence_parallel": True, "pipeline_parallel_size": 2, "data_parallel_size": 4,
     "shard_size": 2, "zero_stage": 2},
    {"tensor_parallel_size": 4, "pipeline_parallel_size": 2, "data_parallel_size": 2, "sequence_parallel": True},
    {"tensor_parallel_size": 4, "data_parallel_size": 2, "zero_stage": 2},
    {"data_parallel_size": 4, "expert_parallel_size": 2, "pipeline_parallel_size": 2},
    {"data_parallel_size": 4, "expert_parallel_size": 4, "recompute": "full", "zero_stage": 2},
    {"tensor_parallel_size": 2, "data_parallel_size": 2, "expert_parallel_size": 4, "recompute": "full"},
    {"tensor_parallel_size": 4, "sequence_parallel": True, "data_parallel_size": 2, "expert_parallel_size": 2,
     "pipeline_parallel_size": 2, "recompute": "full"},
    {"tensor_parallel_size": 2, "sequence_parallel": True, "data_parallel_size": 4, "expert_parallel_size": 4,
     "shard_size": 2, "zero_stage": 2},
    {"data_parallel_size": 4, "expert_parallel_size": 2, "zero_stage": 3},
    {"data_parallel_size": 4, "expert_parallel_size": 2, "shard_size": 2, "zero_stage": 3, "recompute": "full"},
    {"data_parallel_size": 4, "expert_parallel_size": 2, "zero_stage": 0},
    {"tensor_parallel_size": 2, "data_parallel_size": 2, "zero_stage": 1},
    {"context_parallel_size": 2, "tensor_parallel_size": 2, "sequence_parallel": True, "pipeline_parallel_size": 2,
     "data_parallel_size": 2, "recompute": "full"},
    {"context_parallel_size": 2, "data_parallel_size": 4, "shard_size": 2, "zero_stage": 2, "cp_order": "contiguous"},
    {"context_parallel_size": 4, "zero_stage": 0, "recompute": "selective", "cp_method": "ring"},
    {"context_parallel_size": 2, "tensor_parallel_size": 2, "data_parallel_size": 2, "cp_method": "heads"},
    {"context_parallel_size": 2, "tensor_parallel_size": 2, "sequence_parallel": True, "data_parallel_size": 2,
     "expert_parallel_size": 4, "recompute": "full"},
]
EXPERTS = range(17, 26)


MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "gpt": (GPT, "bf16"), "dropout": ({**GPT, "hidden_dropout": 0.1}, "fp32"), "llama": (LLAMA, "bf16"),
    "fp64": (LLAMA, "fp64"), "shared": (LLAMA, "bf16"), "one head": ({**GPT, "num_query_groups": 1}, "fp32"),
    "experts": (ROUTED, "bf16"),
    "hybrid": ({**LLAMA, "mixer_pattern": ("gated_delta", "attention"), "recurrent": RecurrentConfig(
        key_heads=2, kernel=3)}, "bf16"),
    "beside": ({**LLAMA, "mixer": "attention_mamba2", "recurrent": RecurrentConfig(
        heads=4, key_heads=4, kernel=3, attention_multiplier=0.7)}, "bf16"),
    "one group": ({**LLAMA, "mixer": "attention_mamba2", "recurrent": RecurrentConfig(
        heads=4, key_heads=1, kernel=3, key_size=5)}, "bf16"),
    "factored": ({**LLAMA, "qkv_rank": 9, "output_rank": 8, "up_rank": 10, "down_rank": 12}, "bf16"),
}
CASES = [*(("gpt", i) for i in range(15) if i not in (1, 2, 4, 7)), ("dropout", 4), ("dropout", 7), ("llama", 6),
         *(("hybrid", i) for i in (7, *range(26, 30))), *(("beside", i) for i in (2, 3, 7, *range(26, 30))),
         *(("one group", i) for i in (2, 3, 7, *range(26, 30))),
         ("fp64", 3), ("factored", 7), ("factored", 8), *(("llama", i) for i in range(26, 30)),
         ("shared", 15), ("shared", 16), ("one head", 15), *(("experts", i) for i in (*EXPERTS, 30))]


@pytest.mark.parametrize(("name", "number"), CASES)
def test_bytes_are_those_of_a_real_rank(name: str, number: int) -> None:
    layout, (model, dtype) = LAYOUTS[number], MODELS[name]
    config = run(model, dtype, **layout)
    pp, tp = config.layout.pipeline_parallel_size, config.layout.tensor_parallel_size
    case = replace(case_of(config)[0], kernels="torch")
    stages = {0: 0, pp // 2: 0, pp - 1: tp - 1}
    for stage, tensor_rank in stages.items():
        rank = stage * case.dp * case.cp * tp + tensor_rank
        with fake_rank(config, rank) as (engine, ctx, resolved):
            with Traffic(ctx) as trace:
                engine.train_step(batches(resolved, ctx), step=0, lr=1e-3)
            assert not trace.other
        buckets: Any = engine.sharded.buckets  # type: ignore[attr-defined]
        held: dict[str, int] = {"plain": 0, "partial": 0, "shared": 0, "tied": 0, "experts": 0}
        for bucket in buckets:
            for kind, elements in kinds_of(bucket, ctx.mesh).items():
                held[kind] += elements
        planned = step_traffic(case, stage, held).bytes
        if case.zero_stage == 3:  # layers are gathered in whole, and padded more or less than others
            planned = pytest.approx(planned, rel=2e-3)  # type: ignore[assignment]
        assert trace.bytes == planned, f"stage {stage}"
        parameters = sum(len(b.plan.slots) for b in buckets)
        padding = sum(held.values()) - sum(bucket_elements(case, stage).values())
        assert 0 <= padding <= ALIGN * (parameters + case.dp * len(buckets))


def kinds_of(bucket: Bucket, mesh: Mesh) -> dict[str, int]:
    """Elements of a bucket by the planner's kinds; of partial ones, as if each shard held as many as this rank's."""
    plan = bucket.plan
    if plan.tied:
        return {"tied": plan.numel}
    if plan.reduce_dims not in (mesh.dims("dp", "cp"), mesh.dims("dp_shard", "cp")):
        return {"experts": plan.numel}
    out = {"plain": plan.numel}
    for part in plan.partial:
        shard = bucket.shard_slice
        own = max(min(part.stop, shard.stop) - max(part.start, shard.start), 0) * bucket.shards
        kind = {mesh.dims("tp"): "partial", mesh.dims("expert_tp"): "experts"}.get(part.dims, "shared")
        out[kind] = out.get(kind, 0) + own
        out["plain"] -= own
    return out


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("kernels", ["own", "torch"])
def test_the_seconds_move_the_same_bytes(sequence_parallel: bool, recompute: Any, kernels: str) -> None:
    """With links of 1 GB/s and no hops, tensor-parallel seconds are bytes past a rank."""
    config = load("runs/frontier-22b", ["layout.tensor_parallel_size=4", "layout.pipeline_parallel_size=3"]).config
    config = replace(config, layout=replace(config.layout, sequence_parallel=sequence_parallel, data_parallel_size=1),
                     activations=ActivationsConfig(policy=recompute), cluster=replace(config.cluster, nodes=0))
    case = replace(case_of(config)[0], kernels=kernels, engine=ENGINES["native"])
    machine = machine_of(config)
    plain = replace(machine.hardware, package_gb=1.0, node_gb=1.0, node_efficiency=1.0, node_latency_us=0.0)
    nothing_hidden = replace(machine.calibration, overlap_share=0.0)
    machine = Machine(cluster=machine.cluster, hardware=plain, calibration=nothing_hidden)
    costs = chunk_costs(case, machine)
    for stage, cost in enumerate(costs):
        counted = pass_traffic(case, stage)
        ring = {"all-reduce": 2 * 3 / 4, "all-gather": 3 / 4, "reduce-scatter": 3 / 4}
        moved = sum(ring[kind] * size for (axis, kind), size in counted.bytes.items() if axis == "tp")
        assert (cost.forward_tensor + cost.backward_tensor) * 1e9 == pytest.approx(moved, rel=1e-12)


def test_chunks_of_products_hide_what_their_arithmetic_can() -> None:
    """Of k chunks all but one run beside arithmetic; each costs a latency, so more are not always better."""
    config = load("runs/frontier-22b", ["layout.tensor_parallel_size=4", "layout.pipeline_parallel_size=3"]).config
    case, machine = case_of(replace(config, cluster=replace(config.cluster, nodes=0)))[0], machine_of(config)
    exposed = {
        (k, us): sum(c.forward_tensor for c in chunk_costs(replace(case, tensor_chunks=k), Machine(
            cluster=machine.cluster, hardware=replace(machine.hardware, node_latency_us=us)
        ))) for k in (1, 4, 64) for us in (0.0, 100.0)
    }
    assert 0.25 * exposed[1, 0.0] <= exposed[4, 0.0] < 0.7 * exposed[1, 0.0]  # embedding and head stay whole
    assert exposed[64, 0.0] < exposed[4, 0.0]
    assert exposed[64, 100.0] > exposed[1, 100.0]


@pytest.mark.parametrize("zero_stage", [1, 2])
@pytest.mark.parametrize("shard", [0, 1, 2, 4])
def test_the_seconds_of_replicas_move_the_same_bytes(shard: int, zero_stage: int) -> None:
    """With links of 1 GB/s, no hops and nothing hidden: reduce-scatter and all-gather within a shard group, and the
    all-reduce of its pieces beyond."""
    config = load("runs/frontier-22b", [
        "layout.tensor_parallel_size=1", "layout.pipeline_parallel_size=1", "layout.data_parallel_size=8",
        "cluster.nodes=1", f"layout.shard_size={shard}", f"layout.zero_stage={zero_stage}", "engine=native",
    ]).config
    engine = replace(ENGINES["native"], reduce_overlap=0.0, gather_overlap=0.0)
    case, machine = replace(case_of(config)[0], engine=engine), machine_of(config)
    plain = replace(machine.hardware, package_gb=1.0, node_gb=1.0, node_efficiency=1.0, node_latency_us=0.0)
    links = Links.of(Machine(cluster=machine.cluster, hardware=plain))
    counted = step_traffic(case, 0).bytes
    sizes = {"dp": 8, "dp_shard+cp": shard, "dp_replicate": 8 // (shard or 8)}
    ring = {(axis, kind): (1 + (kind == "all-reduce")) * (r - 1) / r for axis, r in sizes.items() if r > 1
            for kind in ("all-reduce", "reduce-scatter", "all-gather")}
    moved = sum(ring[key] * size for key, size in counted.items()) - ring["dp", "all-reduce"] * (SUMS + NORM)
    assert data_seconds(case, links, [Cost()]) * 1e9 == pytest.approx(moved, rel=1e-9)


def test_gathering_again_doubles_the_heads_backward() -> None:
    case, _ = case_of(load("runs/frontier-22b", ["layout.tensor_parallel_size=2", "layout.pipeline_parallel_size=1",
                                                 "layout.sequence_parallel=true"]).config)
    machine = machine_of(load("clusters/frontier").config)
    rates, links, group = Rates.of(machine), Links.of(machine), span(machine, 2, 1)
    head, sums = head_cost(case, rates, links, group), 3 * links.collective(4 * 2048 * case.micro_batch, group)
    assert case.model.seq_length == 2048
    assert head.backward_tensor == pytest.approx(2 * (head.forward_tensor - sums))
    assert layer_cost(case, model_spec(case.model).layers[0], rates, links, group).forward_tensor > 0


def test_deepspeeds_gradients_and_weights_are_those_of_the_plan() -> None:
    """Its ZeRO-1: an all-reduce of fp32 gradients, an all-gather of weights, on groups of its own."""
    config = run(GPT, tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2)
    config = replace(config, engine="deepspeed", layout=replace(config.layout, zero_stage=1))
    case, _ = case_of(config)
    with fake_rank(config, 0, initialise=True) as (engine, ctx, resolved), Traffic(ctx) as trace:
        engine.train_step(batches(resolved, ctx), step=0, lr=1e-3)
    n = stage_elements(case, 0)
    assert trace.bytes[("?", "all-reduce")] == n * case.engine.reduce_bytes + 4  # and the squared norm
    assert trace.bytes[("?", "all-gather")] == n * case.width
    assert trace.bytes[("tp", "all-reduce")] == case.micro_batches * pass_traffic(case, 0).bytes[("tp", "all-reduce")]
