"""The planner's seconds: pipeline against its formula and the trainer's simulator, kernels, links, observations."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import product
from statistics import fmean
from typing import Any

import pytest
from published import doing_also, programs

from megatron_port.core.config.loader import load
from megatron_port.core.errors import ConfigError
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.pipeline.schedules import make_schedule
from megatron_port.ext.telemetry.flops import hardware_flops, model_flops
from megatron_port.tools.plan.case import Case, Machine, case_of, machine_of
from megatron_port.tools.plan.layer import attention_seconds, layer_cost
from megatron_port.tools.plan.rates import Links, Rates, busiest_link, efficiency, scattered, span, used_links
from megatron_port.tools.plan.simulate import simulate
from megatron_port.tools.plan.step import _replica_seconds, plan_step, timeline


def machine(name: str = "frontier") -> Machine:
    return machine_of(load(f"clusters/{name}").config)


def case(*overrides: str, run: str = "runs/frontier-175b") -> Case:
    return case_of(load(run, overrides).config)[0]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "m"), [(1, 3), (2, 2), (4, 4), (4, 9), (8, 200)])
def test_the_pipeline_is_the_trainers_and_its_bubble_the_formula(schedule: str, stages: int, m: int) -> None:
    line = timeline(schedule, stages, [1.0] * stages, [2.0] * stages, micro_batches=m)
    theirs = simulate(make_schedule(schedule, stages, m))
    assert line.span == pytest.approx(max(stage[-1].end for stage in theirs))
    assert (line.span - line.busy[0]) / line.busy[0] == pytest.approx((stages - 1) / m)


@pytest.mark.parametrize(("stages", "chunks", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 64), (8, 12, 64)])
def test_interleaving_divides_the_bubble_by_its_chunks(stages: int, chunks: int, m: int) -> None:
    count = stages * chunks
    line = timeline("1f1b", stages, [1.0] * count, [2.0] * count, micro_batches=m)
    assert (line.span - line.busy[0]) / line.busy[0] == pytest.approx((stages - 1) / (m * chunks))


def test_a_long_step_continues_a_short_one() -> None:
    forward, backward = [1.0, 1.3, 1.1, 1.6], [2.1, 2.0, 2.6, 2.9]
    for duplex in (True, False):
        spans = [
            timeline("1f1b", 4, forward, backward, transfer=0.2, duplex=duplex, micro_batches=m).span
            for m in (15, 31, 47)
        ]
        assert spans[2] - spans[1] == pytest.approx(spans[1] - spans[0], rel=0.02)


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("1f1b", 2), ("zb-h1", 1), ("zb-v", 2)])
def test_the_closed_form_is_near_the_simulation(schedule: str, chunks: int) -> None:
    forward, backward = [1.0] * 8 * chunks, [2.0] * 8 * chunks
    for m, transfer, hidden in product((8, 32, 200), (0.0, 0.05), (True, False)):
        exact, near = (
            timeline(
                schedule, 8, forward, backward, transfer=transfer, hidden=hidden, micro_batches=m, quick=quick
            ).span for quick in (False, True)
        )
        assert near == pytest.approx(exact, rel=0.05 if transfer else 1e-9), (m, transfer, hidden)


def test_sequential_transfers_cost_more_and_hidden_ones_less() -> None:
    spans = [
        timeline("1f1b", 4, [1.0] * 4, [2.0] * 4, transfer=0.3, micro_batches=32, hidden=hidden, duplex=duplex).span
        for hidden, duplex in ((True, True), (False, True), (False, False))
    ]
    assert spans == sorted(spans) and len(set(spans)) == 3


def test_products_reach_what_shapes_allow() -> None:
    rates = Rates.of(machine("selene"))
    assert efficiency(rates, 16384, 16384, 16384) > 0.9
    assert efficiency(rates, 16384, 16384, 64) < 0.4  # the pipeline of a tile is filled and emptied
    units = rates.units
    whole, one_more = (efficiency(rates, 256 * units, n, 8192) for n in (128, 129))
    assert whole > 0.95 and one_more < whole
    for shape in ((2048, 12288, 12288), (2048, 128, 2048), (1, 1, 1)):
        seconds = rates.product(*shape)
        assert 2.0 * shape[0] * shape[1] * shape[2] / seconds <= rates.matmul
        assert 2 * (shape[0] * shape[2] + shape[2] * shape[1] + shape[0] * shape[1]) / seconds <= rates.memory


def test_links_out_of_a_group_hold_up_what_leaves_it() -> None:
    """Frontier: 128 nodes a group, 0.57 of their bandwidth out, half of it between two groups of a dragonfly."""
    frontier = machine()
    links, whole = Links.of(frontier), Links.of(frontier).adapters / 8
    def neighbours(size: int, stride: int) -> float:
        return links.network_share(span(frontier, size, stride)) / whole
    assert neighbours(64, 8) == neighbours(6, 8) == neighbours(384, 8) == 1  # one node of 128 sends out of the group
    assert neighbours(8, 8 * 32) == 1 and neighbours(8, 8 * 64) == pytest.approx(0.57 / 2 / 0.5)
    assert neighbours(8, 8 * 512) == pytest.approx(0.57 / 2)  # every node does
    all_to_all = links.network_share(span(frontier, 256, 8), to_all=True) / whole
    assert all_to_all == pytest.approx(0.57 / 2 / 0.5)  # half of each rank's bytes leave
    far = Links.of(scattered(frontier))
    assert far.network_share(span(frontier, 64, 8)) / whole == pytest.approx(0.57)
    assert far.network_share(span(frontier, 256, 8), to_all=True) / whole == pytest.approx(0.57, rel=0.01)
    assert scattered(machine("rtx4090")) == machine("rtx4090")


@pytest.mark.parametrize(("flows", "uplinks", "groups"), [(1, 20, 1), (4, 20, 4), (16, 16, 1), (32, 32, 4), (8, 1, 1)])
def test_hashed_flows_share_the_busiest_link(flows: int, uplinks: int, groups: int) -> None:
    """The formulas against draws."""
    draw, most, used = random.Random(1), [], []
    for _ in range(400):
        loads = [Counter(draw.randrange(uplinks) for _ in range(flows)) for _ in range(groups)]
        most.append(max(max(load.values()) for load in loads))
        used.append(fmean(len(load) for load in loads))
    assert busiest_link(flows, uplinks, groups) == pytest.approx(fmean(most), rel=0.08)
    assert used_links(flows, uplinks) == pytest.approx(fmean(used), rel=0.03)


def test_a_fat_tree_that_hashes_is_slower_and_one_that_does_not_is_free() -> None:
    """20 nodes of 8 adapters under 160 links: eight flows leave for the next group, and two may share one link."""
    base = machine("selene")
    even = Links.of(base)
    hashed = Links.of(replace(base, hardware=replace(base.hardware, group_uplinks=160)))
    ring, near = span(base, 64, 8), span(base, 8, 8)
    assert even.network_share(ring) == even.network_share(near) == hashed.network_share(near)  # one group
    slow = hashed.network_share(ring) / even.network_share(ring)
    assert slow == pytest.approx(1 / busiest_link(8, 160, 4)) and 0.5 < slow < 0.9
    every = replace(base, hardware=replace(base.hardware, group_uplinks=160, nodes_per_group=20))
    part = Links.of(every).network_share(span(base, 8000, 1), to_all=True) / even.network_share(span(base, 8000, 1))
    assert 0.6 < part < 0.66  # of as many flows as links, 1 - 1/e of these have one


def test_a_ring_that_changes_rails_crosses_the_links_of_its_switches() -> None:
    """Two devices an adapter: of tp 1 a node's ring comes and goes by one adapter, of tp 8 each device has its own."""
    base = machine("a100-4hdr")
    rails = Links.of(replace(base, hardware=replace(base.hardware, rails=True, group_uplinks=20)))
    for tp, kept in ((1, 1.0), (2, 1 / busiest_link(16, 20, 4)), (4, 1 / busiest_link(16, 20, 4)), (8, 1.0)):
        group = span(base, 128 // tp, tp)  # 16 nodes, below 20 of one group
        assert rails.network_share(group) / Links.of(base).network_share(group) == pytest.approx(kept)
    assert 1 / busiest_link(16, 20, 4) < 0.35


def test_only_all_reduces_have_trees() -> None:
    """NCCL and RCCL gather and scatter along rings: as many hops as ranks, whatever the bytes."""
    links, group = Links.of(machine()), span(machine(), 64, 8)
    hops = [links.collective(1.0, group, kind=kind) / links.far for kind in ("half", "all-reduce")]
    assert hops[0] == pytest.approx(63, rel=1e-3) and 12 <= hops[1] < 14


def test_fp8_products_of_the_backward_pass_sum_in_fp32_which_slows_some_devices() -> None:
    hopper, blackwell = Rates.of(machine("dgx-h100")), Rates.of(machine("b200"))
    for rates, slower in ((hopper, 1 / 0.87), (blackwell, 1.0)):
        fast, exact = (rates.product(8192, 8192, 8192, width=1, exact=e) - rates.launch for e in (False, True))
        assert exact / fast == pytest.approx(slower)
    assert hopper.product(512, 512, 512, exact=True) == hopper.product(512, 512, 512)  # bf16 always does


def test_levels_of_links() -> None:
    links = Links.of(machine())
    package, node, nodes = (links.collective(1e9, span(machine(), size, 1)) / (size - 1) * size for size in (2, 8, 16))
    assert package < node < nodes
    assert links.collective(1e9, span(machine(), 1, 1)) == 0
    # Eight groups of a node share its adapters; one group that spans the node has them all.
    shared, alone = links.collective(1e9, span(machine(), 4, 8)), links.collective(1e9, span(machine(), 32, 1))
    assert shared > 3 * alone
    half = links.collective(1e9, span(machine(), 8, 1), kind="half")
    assert half == pytest.approx(links.collective(1e9, span(machine(), 8, 1)) / 2)


def test_one_box_has_no_network() -> None:
    with pytest.raises(ConfigError, match=r"rtx4090 has no network"):
        Links.of(machine("rtx4090")).collective(1e6, span(machine("rtx4090"), 16, 1))


def test_parts_add_up_and_rates_follow_from_the_flops() -> None:
    c = case()
    step = plan_step(c, machine())
    assert sum(step.split.parts().values()) == pytest.approx(step.seconds)
    assert min(step.split.parts().values()) >= 0
    assert step.model_tflops == pytest.approx(model_flops(c.model) * 640 / step.seconds / 128 / 1e12)
    assert step.hardware_tflops == pytest.approx(hardware_flops(c.model, "full") * 640 / step.seconds / 128 / 1e12)
    assert step.mfu == pytest.approx(step.model_tflops / 191.5)


def test_the_papers_observations() -> None:
    """arXiv 2312.12705, III.1 to III.4."""
    m = machine()

    def rate(**changes: Any) -> float:
        return plan_step(replace(base, **changes), m).hardware_tflops

    base = case("layout.tensor_parallel_size=1", "layout.pipeline_parallel_size=8", run="runs/frontier-22b")
    tensor = [rate(tp=t, dp=16 // t, pp=1, split=(), micro_batches=640 * t // 16) for t in (1, 2, 4, 8)]
    assert tensor == sorted(tensor, reverse=True)  # III.1: larger tensor parallelism is slower
    many = [rate(micro_batches=n, global_batch=2 * n) for n in (8, 16, 64, 256)]
    assert many == sorted(many)  # III.2: many micro-batches hide the bubble
    stages = [rate(pp=p, dp=1, split=(), micro_batches=64, global_batch=64) for p in (4, 8, 16, 24)]
    assert stages == sorted(stages, reverse=True)  # III.3: more stages at a fixed batch are slower
    base = case(run="runs/frontier-175b")  # enough layers a stage that the head's imbalance stays small
    held = [rate(pp=p, dp=1, split=(), micro_batches=8 * p, global_batch=8 * p) for p in (4, 8, 16)]
    assert max(held) / min(held) < 1.07  # III.4: throughput holds with the ratio of stages to micro-batches


def test_zero_3_gathers_layer_by_layer_and_deepspeed_late_beside_large_parameters() -> None:
    """Each collective has its own hops; DeepSpeed fetches nothing beside 1e9 elements and gathers such layers twice."""
    far = machine("a100-ndv4")
    small = replace(case(), engine=programs.DEEPSPEED_ZERO3, tp=1, pp=1, dp=128, zero_stage=3, recompute="full",
                    micro_batches=1)
    large = replace(small, model=replace(small.model, hidden_size=32768, num_attention_heads=256))
    assert programs.FSDP2.late_gathers(small) == (0.0, 1)
    assert small.engine.late_gathers(small) == (0.0, 2)  # 175B: 6e8 elements in the largest matrix, 1.8e9 in a layer
    assert large.engine.late_gathers(large) == (1.0, 2)
    mixed = replace(large, model=replace(large.model, hidden_size=20480, num_attention_heads=160))
    late = mixed.engine.late_gathers(mixed)[0]
    assert late == pytest.approx(8 / 12)  # all but the first of the MLP, which follows a small one
    links = Links.of(far)
    whole, parts = (_replica_seconds(small, links, 10**9, pieces)[1] for pieces in (1, 96))
    assert parts - whole == pytest.approx(95 * links.collective(1, span(far, 128, 1), kind="half"), rel=1e-3)
    late = plan_step(large, far).split.data
    early = plan_step(replace(large, engine=replace(programs.DEEPSPEED_ZERO3, live_elements=1e12)), far).split.data
    assert late > 2 * early


def test_gradients_of_residuals_and_biases_are_passes_of_their_own() -> None:
    """Autograd adds a residual branch's gradient, three tensors a norm; biases' and norms' read theirs once more."""
    selene, plain = machine("selene"), replace(case(), kernels="fused", tp=1, recompute="none")
    rates, links, layer = Rates.of(selene), Links.of(selene), model_spec(plain.model).layers[0]

    def bytes_of(kernels: str = "fused", **flags: Any) -> float:
        one = replace(plain, kernels=kernels, engine=doing_also(plain.engine, **flags))
        return layer_cost(one, layer, rates, links, span(selene, 1, 1)).backward * rates.memory

    stream = 2.0 * plain.model.seq_length * plain.micro_batch * plain.model.hidden_size
    bare, added = bytes_of(adds_gradients=False), bytes_of()
    assert added - bare == pytest.approx(6 * stream)
    assert bytes_of(bias_passes=True) - added == pytest.approx((2 + 2 + 4 + 3) * stream)  # branches, norms, up, q k v
    assert bytes_of("own") == pytest.approx(bare)  # the norm's own kernel adds it


def test_weak_scaling_of_1t() -> None:
    rates = []
    for nodes in (128, 384):
        c = case(f"cluster.nodes={nodes}", f"batch.global_batch_size={1600 * nodes // 64}", run="runs/frontier-1t")
        rates.append(plan_step(c, machine()).hardware_tflops)
    assert rates[1] / rates[0] > 0.98


def test_zero_2_reduces_after_every_micro_batch() -> None:
    m = machine()
    one = case("engine=native", "layout.zero_stage=1")
    two = replace(one, zero_stage=2)
    exposed = [plan_step(c, m).split.data for c in (one, two)]
    assert exposed[1] > exposed[0]
    hidden = [plan_step(replace(c, micro_batches=4 * c.micro_batches), m).split.data for c in (one, two)]
    assert hidden[0] == exposed[0] and exposed[1] < hidden[1] <= 4 * exposed[1]


def test_attention_within_documents_takes_their_squares() -> None:
    """8 documents of 512 in 4,096 tokens: an eighth of a fused core's operations, at the rate of 512 positions."""
    run = ["model.seq_length=4096", "data.attention_documents=within", "backend.attention=flash_attn"]
    whole, parts = case(*run), case(*run, "data.document_length=512")
    assert case(*run[:1], *run[2:], "data.document_length=512").document == 0.0
    rates = Rates.of(machine())
    layer = model_spec(whole.model).layers[0]
    launches = attention_seconds(replace(whole, document=1e-9), layer, rates)
    slower = [a / b for a, b in zip(*(rates.attention("flash2", n, whole.model.head_size) for n in (4096, 512)))]
    assert all(s > 1.1 for s in slower)
    for long, short, least, by in zip(*(attention_seconds(c, layer, rates) for c in (whole, parts)), launches, slower):
        assert short - least == pytest.approx((long - least) / 8 * by, rel=1e-6)
    core, count = layer.mixer.flops(4096), whole.model.num_layers
    assert model_flops(whole.model) - model_flops(whole.model, document=512) == 3 * count * core * 7 // 8
    steps = [plan_step(c, machine()) for c in (whole, parts)]
    assert steps[1].seconds < steps[0].seconds
    assert steps[1].model_tflops * steps[1].seconds < steps[0].model_tflops * steps[0].seconds
