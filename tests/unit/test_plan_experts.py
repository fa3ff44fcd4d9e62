"""Layers of experts in the planner: where they lie, what they send, which layouts a search tries."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from published import doing_also

from megatron_port.core.config.checks import problems
from megatron_port.core.config.layout import expert_cuts
from megatron_port.core.config.loader import load
from megatron_port.core.config.model import MoEConfig, RoutesConfig
from megatron_port.core.config.schema import (
    BatchConfig,
    DataConfig,
    LayoutConfig,
    ModelConfig,
    PrecisionConfig,
    RunConfig,
)
from megatron_port.core.dist.mesh import Mesh
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.ext.experts.spec import moe_of
from megatron_port.ext.telemetry.flops import parameter_count
from megatron_port.tools.plan.case import Case, Machine, case_of, machine_of
from megatron_port.tools.plan.elements import bucket_elements, expert_elements, stage_elements
from megatron_port.tools.plan.engines import ENGINES
from megatron_port.tools.plan.exchanges import exchange_seconds, expert_cost
from megatron_port.tools.plan.guard import memory_problem
from megatron_port.tools.plan.layer import layer_cost
from megatron_port.tools.plan.memory import held_bytes, plan_memory
from megatron_port.tools.plan.rates import Links, Rates, span
from megatron_port.tools.plan.search import options_of, search, settings_of
from megatron_port.tools.plan.step import chunk_costs, plan_step
from megatron_port.tools.plan.text import explain, make_plan, render

MODEL = ModelConfig(
    num_layers=4, hidden_size=512, num_attention_heads=8, vocab_size=1024, seq_length=256, activation="swiglu",
    normalization="rmsnorm", position_embedding="rope", add_bias=False, tie_embeddings=False,
    moe=MoEConfig(num_experts=16, top_k=2, ffn_hidden_size=256, shared_ffn_hidden_size=512, first_dense=1),
)


def run(**layout: Any) -> RunConfig:
    """A run on two nodes of eight H200."""
    cluster = load("clusters/h200").config
    return RunConfig(
        model=MODEL, layout=LayoutConfig(**{"vocab_padding_multiple": 8, **layout}),
        batch=BatchConfig(micro_batch_size=2, global_batch_size=64), precision=PrecisionConfig(dtype="bf16"),
        data=DataConfig(synthetic=True), engine="native", cluster=replace(cluster.cluster, nodes=2),
        hardware=cluster.hardware,
    )


def bare(config: RunConfig, **links: float) -> Machine:
    """The machine with links of 1 GB/s and no latencies."""
    machine = machine_of(config)
    plain: dict[str, Any] = {
        "node_gb": 1.0, "node_efficiency": 1.0, "node_latency_us": 0.0, "package_gb": 1.0, "nics": 8, "nic_gb": 1.0,
        "network_efficiency": 1.0, "network_latency_us": 0.0, **links,
    }
    return Machine(cluster=machine.cluster, hardware=replace(machine.hardware, **plain))


def test_ranks_of_experts_are_those_of_the_mesh() -> None:
    """Who splits the state of a rank's experts, who else holds it, who of tp sums: against the sets of the mesh."""
    draw, seen = random.Random(5), 0
    for _ in range(400):
        tp, cp, dp = draw.choice((1, 2, 4, 8)), draw.choice((1, 2, 3)), draw.choice((1, 2, 3, 4, 6, 8, 16))
        shard = draw.choice([s for s in (1, 2, 3, 4, 8) if dp % s == 0])
        ep = draw.choice(expert_cuts(tp, cp, dp, shard)[1])
        case = Case(model=MODEL, engine=ENGINES["native"], tp=tp, cp=cp, dp=dp, shard=shard, ep=ep, zero_stage=1)
        mesh = Mesh.of({"tp": tp, "cp": cp, "dp_shard": shard, "dp_replicate": dp // shard}, ep=ep)
        rest = mesh.stage - mesh.dims("ep")
        found = (
            mesh.size(rest & mesh.dims("cp", "dp_shard")), mesh.size(rest & mesh.dims("dp_replicate")),
            mesh.size(rest & mesh.dims("tp")), mesh.size(rest & mesh.dims("dp", "cp")),
        )
        copies = case.expert_copies if case.shards > 1 else case.expert_replicas
        assert (case.expert_shards, copies, case.expert_sums, case.expert_replicas) == found, case.label()
        seen += found[0] > 1 and found[1] > 1
    assert seen > 10


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_each_byte_of_state_is_held_once_for_each_copy(zero_stage: int) -> None:
    """Summed over the ranks of the run, weights, sums and state are the model's, as often as they are copied."""
    for layout in ({"expert_parallel_size": 4}, {"expert_parallel_size": 8, "tensor_parallel_size": 2},
                   {"expert_parallel_size": 2, "tensor_parallel_size": 4, "pipeline_parallel_size": 2}):
        case, _ = case_of(run(zero_stage=zero_stage, **layout))
        stages = [(stage_elements(case, s), expert_elements(case, s)) for s in range(case.pp)]
        each = sum(p.numel for layer in model_spec(MODEL).layers for p in layer.parameters if "experts" in p.name)
        ranks = case.tp * case.dp
        assert sum(experts for _, experts in stages) * case.ep == each
        held = [held_bytes(case, experts, experts, experts) for _, experts in stages]
        copies = ranks // case.ep
        whole = {"weights": 2 * each, "sums": 4 * each, "state": 12 * each}
        split = {"weights": zero_stage == 3, "sums": zero_stage >= 2, "state": zero_stage >= 1}
        for i, name in enumerate(whole):
            times = case.expert_sums if split[name] else copies
            assert sum(h[i] for h in held) * ranks == whole[name] * times, (name, layout)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("tp", "ep", "inside", "outside"), [(1, 8, 7 / 8, 0), (2, 8, 7 / 8, 0), (1, 16, 0, 8 / 16)])
def test_exchange_moves_four_rows_a_token(tp: int, ep: int, inside: float, outside: float, recompute: str) -> None:
    """4·k·h·w bytes per token and layer, less what stays: two passes forward and two backward, and two more again."""
    config = run(tensor_parallel_size=tp, expert_parallel_size=ep)
    case = replace(case_of(config)[0], recompute=recompute, imbalance=1.0)
    links, layer = Links.of(bare(config)), model_spec(MODEL).layers[-1]
    moe = moe_of(layer)
    assert moe is not None
    tokens = MODEL.seq_length * case.micro_batch / tp
    moved = 4 * 2 * MODEL.hidden_size * 2 * tokens * (inside + outside)
    assert 4 * exchange_seconds(case, moe, links) * 1e9 == pytest.approx(moved)
    assert 4 * exchange_seconds(replace(case, imbalance=1.5), moe, links) * 1e9 == pytest.approx(1.5 * moved)
    cost = layer_cost(case, layer, Rates.of(bare(config)), links, span(links.machine, tp, 1))
    alone = expert_cost(case, moe, Rates.of(bare(config)), links)
    again = alone.backward_exchange if recompute == "full" else 0.0  # rows alone: their numbers are known
    nothing = replace(case, engine=replace(case.engine, expert_overlap="none"))
    shown = layer_cost(nothing, layer, Rates.of(bare(config)), links, span(links.machine, tp, 1))
    assert shown.backward_exchange == pytest.approx(alone.backward_exchange + again)
    once = exchange_seconds(case, moe, links)  # of which the shared block hides what it takes itself
    assert 0 < shown.forward_exchange - cost.forward_exchange < once
    assert 0 < shown.backward_exchange - cost.backward_exchange < (2 if again else 1) * once
    assert (alone.forward_exchange + alone.backward_exchange) * 1e9 > moved  # the counts, and the host


def test_weight_passes_fill_exchanges_of_zero_bubble() -> None:
    """Those of the shared blocks' engine alone; what they fill is no longer waited for, and the step is shorter by it,
    but for what the first and last micro-batches wait for."""
    config = run(pipeline_parallel_size=2, pipeline_schedule="zb-h1", expert_parallel_size=8)
    case, machine = case_of(config)[0], bare(config)
    filled, plain = plan_step(case, machine), plan_step(
        replace(case, engine=replace(case.engine, expert_overlap="none")), machine
    )
    layer = model_spec(MODEL).layers[-1]
    moe = moe_of(layer)
    assert moe is not None and case.micro_batches == 4 and sum(plain.timeline.filled) == 0
    assert max(filled.timeline.filled) == pytest.approx(
        2 * min(2 * 2 * exchange_seconds(case, moe, Links.of(machine)), weight_seconds(case, machine)), rel=0.2
    )
    assert plain.seconds > filled.seconds
    assert filled.split.experts == pytest.approx(
        case.micro_batches * sum(chunk_costs(case, machine)[-1].parts[4:6]) - filled.timeline.filled[-1]
    )


def weight_seconds(case: Case, machine: Machine) -> float:
    """Seconds of the last stage's weight pass."""
    last = chunk_costs(case, machine)[-1]
    return (last.passes[1] - last.backward_exchange) / 2


def test_a_token_may_go_once_to_each_node() -> None:
    """What leaves a node shrinks to the nodes that a token goes to, of which one in two is its own here."""
    config = run(expert_parallel_size=16)
    case = replace(case_of(config)[0], imbalance=1.0)
    links, moe = Links.of(bare(config, node_gb=1e6)), moe_of(model_spec(MODEL).layers[-1])
    assert moe is not None
    once = replace(case, engine=doing_also(case.engine, sends_once_per_node=True))
    # Two experts are on one node in half of all cases: 1.5 nodes a token instead of 2 rows.
    assert exchange_seconds(once, moe, links) == pytest.approx(0.75 * exchange_seconds(case, moe, links))


def test_imbalance_costs_time_and_a_layer_of_memory() -> None:
    """None with one rank; not beyond what a capacity allows; rows of one layer more in memory."""
    config = run(expert_parallel_size=8)
    machine, case = machine_of(config), case_of(config)[0]
    assert case.imbalance == RoutesConfig().imbalance > 1
    seconds = [plan_step(replace(case, imbalance=x), machine).seconds for x in (1.0, 1.5, 2.0)]
    assert seconds[0] < seconds[1] < seconds[2]
    alone = replace(case, ep=1)
    assert plan_step(alone, machine) == plan_step(replace(alone, imbalance=1.0), machine)
    full = replace(MODEL, moe=replace(MODEL.moe, capacity_factor=1.25))
    capped = [plan_step(replace(case, model=full, imbalance=x), machine).seconds for x in (1.25, 1.8)]
    assert capped[0] == capped[1]
    even, uneven = (plan_memory(replace(case, imbalance=x), machine)[0] for x in (1.0, 2.0))
    layer = (uneven.total - even.total) / (1 + machine.hardware.fragmentation)
    rows = 2 * MODEL.seq_length * case.micro_batch
    assert uneven.static == even.static and 0 < layer < 2 * rows * (4 * 512 + 6 * 256) * 2


def test_the_search_tries_every_size_that_training_takes() -> None:
    """All layouts are legal, several sizes are among them, and the settings name them."""
    config = run(expert_parallel_size=2)
    case, machine = case_of(config)[0], machine_of(config)
    found = search(case, machine, replace(options_of(config, case), recompute=("none",), micro=(2,)))
    assert {c.case.ep for c in found} == {1, 2, 4, 8, 16}
    for candidate in found[::7]:
        values = settings_of(config, candidate.case)
        assert values["layout.expert_parallel_size"] == candidate.case.ep
        changed = config
        for name, value in values.items():
            table, key = name.split(".")
            changed = replace(changed, **{table: replace(getattr(changed, table), **{key: value})})
        assert not problems(changed), candidate.case.label()
    dense = replace(config, model=replace(MODEL, moe=MoEConfig()), layout=LayoutConfig())
    assert options_of(dense, case_of(dense)[0]).experts == (1,)


def test_a_plan_names_experts() -> None:
    """Where they are, what they hold, what they send, what imbalance costs."""
    plan = make_plan(run(expert_parallel_size=16, tensor_parallel_size=2), tokens=1e9, neighbours=False)
    text, more = render(plan), explain(plan)
    assert "3 layers of 16 on 16 ranks, 2 nodes: 1 on each; a token goes to 2" in text and "ep 16" in text
    assert "  experts " in text.split("step ")[1] and f"{parameter_count(MODEL):,}" in text
    assert f"4·k·h·w = 4 · 2 · 512 · 2 = {4 * 2 * 512 * 2:,} bytes per token and layer" in more
    assert "with forced balance" in more
    assert bucket_elements(plan.case, 0)["experts"] == plan.memory[0].experts == 3 * 3 * 512 * 256


@pytest.mark.parametrize(("name", "parameters"), [
    ("mixtral-h200-8gpu", 46_702_792_704), ("qwen3-30b-frontier", 30_532_122_624),
    ("deepseek-v3-2048gpu", 671_026_404_352),
])
def test_shipped_runs_fit_because_experts_are_divided(name: str, parameters: int) -> None:
    """Legal, within a device, and not so with whole layers of experts on each rank."""
    config = load(f"runs/{name}").config
    assert parameter_count(config.model) == parameters
    assert not problems(config) and memory_problem(config) == ""
    whole = replace(config, layout=replace(config.layout, expert_parallel_size=1))
    case, machine = case_of(whole)[0], machine_of(whole)
    assert max(m.total for m in plan_memory(case, machine)) > machine.cluster.memory_gb * 1e9
