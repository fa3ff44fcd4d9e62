"""Context parallelism in plans: bytes and seconds of the exchange, the busiest rank, memory by rank, the search."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from published import doing_also

from megatron_port.core.config.checks import problems
from megatron_port.core.config.layout import with_values
from megatron_port.core.config.loader import load
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.ext.telemetry.flops import attention_counted, causal_flops, model_flops
from megatron_port.tools.plan import exchanges as context_balance
from megatron_port.tools.plan.case import Machine, case_of, machine_of
from megatron_port.tools.plan.chunk import layer_bytes
from megatron_port.tools.plan.exchanges import context_bytes, context_cost, head_bytes, work_imbalance
from megatron_port.tools.plan.guard import memory_problem
from megatron_port.tools.plan.memory import plan_memory
from megatron_port.tools.plan.rates import Links, Rates
from megatron_port.tools.plan.search import options_of, search, settings_of
from megatron_port.tools.plan.step import plan_step
from megatron_port.tools.plan.text import explain, make_plan, render


def run(**values: object) -> RunConfig:
    """Llama-3 8B with 32,768 positions on two DGX H100."""
    layout = {"tensor_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 4, **values}
    base = load("runs/llama-70b-1node-8gpu", ["layout.zero_stage=1", "offload.optimizer=none"]).config
    model = replace(load("models/llama-8b").config.model, seq_length=32768)
    cluster = load("clusters/dgx-h100").config
    return replace(
        with_values(base, {"layout.data_parallel_size": 0, **{f"layout.{k}": v for k, v in layout.items()}}),
        model=model, cluster=replace(cluster.cluster, nodes=2), hardware=cluster.hardware,
    )


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("method", ["gather", "heads", "ring"])
def test_the_seconds_of_the_exchange_move_its_bytes(method: str, recompute: str) -> None:
    """With links of 1 GB/s, no hops' latency and attention that hides nothing."""
    config = run()
    case = replace(case_of(config)[0], cp_method=method, recompute=recompute)
    hardware = replace(config.hardware, node_gb=1.0, node_efficiency=1.0, node_latency_us=0.0, package_devices=1)
    links = Links.of(Machine(cluster=config.cluster, hardware=hardware))
    layer = model_spec(case.model).layers[0]
    found = context_cost(case, layer, Rates.of(machine_of(config)), links, (0.0, 0.0), again=recompute != "none")
    share = 1 if method == "ring" else 3 / 4  # of a buffer, what leaves a rank of four
    moved = share * sum(context_bytes(case, layer).values())
    assert (found.forward_context + found.backward_context) * 1e9 == pytest.approx(moved)
    assert found.forward > 0  # tensors are put in order
    own = head_bytes(case, layer)
    assert own.queries == 32768 / 4 * 32 / 2 * 128 * 2 and own.keys_values == own.queries / 2


def test_attention_hides_a_ring_and_nothing_of_a_gather() -> None:
    config = run()
    machine, layer = machine_of(config), model_spec(config.model).layers[0]
    rates, links = Rates.of(machine), Links.of(machine)
    ring, gather = (replace(case_of(config)[0], cp_method=method) for method in ("ring", "gather"))
    exposed = [context_cost(ring, layer, rates, links, (t, t), again=False).forward_context for t in (0.0, 1e-4, 1.0)]
    assert exposed[0] > exposed[1] > exposed[2] == 0.0
    whole = context_cost(gather, layer, rates, links, (1.0, 1.0), again=False)
    assert whole.forward_context == context_cost(gather, layer, rates, links, (0.0, 0.0), again=False).forward_context
    blocks = replace(gather, engine=doing_also(gather.engine, block_bytes=(40.0, 60.0)))  # torch's, by blocks
    pieces = [context_cost(blocks, layer, rates, links, (t, t), again=False) for t in (0.0, 1.0)]
    elements = head_bytes(gather, layer).queries / 2
    kernels = 6 * 3 * rates.launch, 8 * 4 * rates.launch
    assert pieces[0].forward == pytest.approx(3 * 40 * elements / rates.memory + kernels[0])  # the other ranks' blocks
    assert pieces[0].backward == pytest.approx(4 * 60 * elements / rates.memory + kernels[1])
    assert pieces[1].forward_context == 0.0 < pieces[1].backward_context < pieces[0].backward_context  # the way home
    assert pieces[0].forward_context > 1.9 * whole.forward_context  # keys and values of as many heads as the queries
    plans = {case.cp_method: plan_step(case, machine).split for case in (ring, gather)}
    assert plans["ring"].context < plans["gather"].context
    assert plan_step(replace(gather, cp=1, dp=8), machine).split.context == 0.0


def brute(order: str, cp: int, seq: int, window: int, starts: list[int]) -> float:
    """Work of the busiest rank over the mean, position by position."""
    first = [max(s for s in starts if s <= i) for i in range(seq)]
    work = [min(i - first[i] + 1, window or seq) - 0.5 for i in range(seq)]  # as areas, not as counts
    chunks = cp if order == "contiguous" else 2 * cp
    loads = [0.0] * cp
    for i, each in enumerate(work):
        chunk = i * chunks // seq
        loads[chunk if chunk < cp else 2 * cp - 1 - chunk] += each
    return max(loads) * cp / sum(loads)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_the_busiest_rank_is_that_of_every_position(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(3)
    for cp, window in ((2, 0), (4, 0), (4, 96), (8, 0)):
        starts = sorted({0, *(draw.randrange(512) for _ in range(draw.choice((0, 1, 5))))})
        monkeypatch.setattr(context_balance, "_starts", lambda *_, starts=starts: starts)
        context_balance.work_imbalance.cache_clear()
        found = work_imbalance(order, cp, 512, window, 100.0)
        assert found == pytest.approx(brute(order, cp, 512, window, starts), rel=0.02 if window else 1e-9)
    context_balance.work_imbalance.cache_clear()
    monkeypatch.undo()
    assert work_imbalance("contiguous", 4, 4096) == pytest.approx(2 - 1 / 4) and work_imbalance("zigzag", 4, 4096) == 1
    long, short = (work_imbalance("zigzag", 4, 65536, 0, document) for document in (30000.0, 1000.0))
    assert long > short > 1.1  # documents undo what zigzag is for
    assert work_imbalance("balanced", 4, 65536, 0, 1000.0) == 1
    with pytest.raises(ValueError, match="contiguous, zigzag, balanced"):
        work_imbalance("striped", 4, 4096)


@pytest.mark.parametrize("fused", [True, False])
def test_memory_is_divided_as_the_tokens_are(fused: bool) -> None:
    """Within 2 % of 1 / cp, gathered keys and values left out; state over replicas × cp to the byte."""
    case = replace(case_of(run(context_parallel_size=1))[0], flash=fused, recompute="none", dp=8, kernels="own")
    whole = layer_bytes(case, 0)
    for cp in (2, 4, 8):
        divided = replace(case, cp=cp, dp=8 // cp)
        own = head_bytes(divided, model_spec(case.model).layers[0]).keys_values
        gathered = cp * own - (own if fused else 0)
        scores = 0.0 if fused else 32768**2 * 16 * 2 / cp  # rows that see no key are masked once more
        assert (layer_bytes(divided, 0) - gathered - scores) * cp == pytest.approx(whole, rel=0.02)
        machine = machine_of(run())
        assert plan_memory(divided, machine)[0].static == plan_memory(case, machine)[0].static


def test_the_search_divides_long_sequences_as_training_would() -> None:
    config = run()
    case, machine = case_of(config)[0], machine_of(config)
    options = replace(options_of(config, case), recompute=("full",), micro=(1,), chunks=(1,))
    assert options.context == (1, 2, 4, 8) and options.methods[0] == "gather" and options.orders[0] == "zigzag"
    found = search(case, machine, options)
    assert {c.case.cp for c in found} == {1, 2, 4, 8}
    for candidate in found[::9]:
        assert not problems(with_values(config, settings_of(config, candidate.case))), candidate.case.label()
    short = with_values(run(context_parallel_size=1), {"model.seq_length": 4096})
    assert options_of(short, case_of(short)[0]).context == (1,)


def test_a_plan_says_who_shares_sequences_and_which_pairs_of_positions_it_counts() -> None:
    plan = make_plan(run(), tokens=1e9, neighbours=False)
    text, more = render(plan), explain(plan)
    assert "4 ranks on 1 node share a sequence, 8,192 of its 32,768 positions each; attention of the busiest" in text
    own = 2 * 8192 * 4 * 128 * 2  # keys and values of four heads in bf16
    assert f"{own / 1e6:.1f} MB of a rank's own positions, {4 * own / 1e6:.1f} MB of all; by gather" in more
    assert "  context " in text.split("step ")[1] and "attention counted in full" in text
    model = plan.case.model
    half = 6 * model.seq_length**2 * 32 * 128  # of the 4·s²·a·d of a layer's forward, and of twice that backward
    assert model_flops(model) - causal_flops(model) == 32 * half
    assert plan.step.causal_tflops / plan.step.model_tflops == pytest.approx(causal_flops(model) / model_flops(model))
    assert attention_counted(model) == "attention counted in full: all pairs of 32,768 positions, causal or not"
    assert "within documents of 2,000 tokens" in attention_counted(model, 2000.0)


@pytest.mark.parametrize(("name", "world"), [
    ("llama-405b-128k", 16384), ("llama-8b-128k-1node", 8), ("gpt-1t-32k-frontier", 3072),
    ("hybrid-8b-1m-1node", 8),
])
def test_shipped_runs_fit_because_sequences_are_divided(name: str, world: int) -> None:
    """Legal, within a device, and not so with replicas in place of the ranks that share a sequence."""
    config = load(f"runs/{name}").config
    assert case_of(config)[0].world == world and not problems(config) and memory_problem(config) == ""
    cp = config.layout.context_parallel_size
    whole = with_values(config, {
        "layout.context_parallel_size": 1, "layout.data_parallel_size": 0, "activations.policy": "full",
        "batch.global_batch_size": cp * config.batch.global_batch_size,
    })
    case, machine = case_of(whole)[0], machine_of(whole)
    assert case.world == world and max(m.total for m in plan_memory(case, machine)) > machine.cluster.memory_gb * 1e9


def test_a_fused_ring_has_no_scores() -> None:
    """Memory grows with the positions, with scores by their square: also under a mask that torch's flash attention does
    not know."""
    def growth(setting: str = "") -> float:
        peaks = []
        for length in (32768, 65536, 131072):
            sets = ["layout.cp_method=ring", f"model.seq_length={length}", *filter(None, [setting])]
            config = load("runs/llama-8b-128k-1node", sets).config
            case, _ = case_of(config, 8)
            assert case.flash == (not setting)
            peaks.append(plan_memory(case, machine_of(config))[0].allocated)
        return (peaks[2] - peaks[1]) / (peaks[1] - peaks[0])

    assert growth() == pytest.approx(2, rel=0.01)
    assert growth("backend.attention=math") > 3.5 and growth("model.sliding_window=4096") > 3.5
