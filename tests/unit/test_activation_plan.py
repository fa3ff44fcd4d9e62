"""The plan of activations: against every other choice, against full and selective recompute, and as a run trains it."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_port.core.config.checks import problems
from megatron_port.core.config.dump import to_toml
from megatron_port.core.config.layout import with_values
from megatron_port.core.config.loader import load
from megatron_port.core.config.schema import (
    ActivationsConfig,
    BackendConfig,
    BatchConfig,
    LayoutConfig,
    ModelConfig,
    PrecisionConfig,
    RunConfig,
)
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.engine.native import NativeEngine
from megatron_port.core.errors import ConfigError
from megatron_port.core.layers.providers import torch_providers
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.model.ops import Site
from megatron_port.ext.memory.sites import RECOMPUTED
from megatron_port.ext.telemetry.flops import hardware_flops
from megatron_port.run.build import build_engine
from megatron_port.tools.plan.activation_plan import (
    AFTER,
    Item,
    Swap,
    cover,
    describe,
    plan_activations,
    saved,
    with_activation_plan,
)
from megatron_port.tools.plan.case import Case, Machine, case_of, machine_of
from megatron_port.tools.plan.layer import layer_cost, site_costs
from megatron_port.tools.plan.memory import HostLink, plan_memory, stage_memory
from megatron_port.tools.plan.rates import Links, Rates, span
from megatron_port.tools.plan.step import chunk_costs, plan_step


def by_trying(items: tuple[Item, ...], layers: int, held: float, lacking: float) -> float | None:
    """Least seconds over every choice."""
    found = []
    useful = {item.site for item in items if item.size}
    for counts in itertools.product(range(layers + 1), repeat=len(items)):
        chosen = dict(zip((item.site for item in items), counts))
        legal = all(chosen.get(b, 0) <= chosen[a] for b, a in AFTER.items() if a in useful)
        if legal and sum(saved(item, n, held) for item, n in zip(items, counts)) >= lacking:
            found.append(sum(item.seconds * n for item, n in zip(items, counts)))
    return min(found, default=None)


@pytest.mark.parametrize("seed", range(30))
def test_no_choice_is_faster(seed: int) -> None:
    r = random.Random(seed)
    sites = tuple(site for site in RECOMPUTED if site not in ("qkv", "core", "norm1") or r.random() < 0.3)
    items = tuple(Item(site, r.choice((0.1, 1.0, 3.0)) * r.random(), r.choice((0, 1, 4, 7))) for site in sites)
    layers, held = r.choice((1, 2, 3)), r.choice((1, 2.5, 8))
    whole = sum(saved(item, layers, held) for item in items)
    for share in (0.0, 0.3, 0.7, 0.95, 1.0 - 1e-9, 1.01):
        lacking, best = share * whole, by_trying(items, layers, held, share * whole)
        found = cover(items, layers, held, lacking, after=AFTER)
        assert (found is None) == (best is None)
        if found is not None and best is not None:
            counts = [(item, found.get(item.site, 0)) for item in items]
            assert sum(saved(item, n, held) for item, n in counts) >= lacking
            assert sum(item.seconds * n for item, n in counts) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_no_mixture_with_swapping_is_faster_by_more_than_a_layer(seed: int) -> None:
    """Two sites, each recomputed, partitioned, swapped or kept in every layer, against all of that."""
    r = random.Random(seed)
    items = [Item("qkv", r.random(), 3.0), Item("residual", r.random(), 1.0),
             Item("residual", 0.5 * r.random(), 0.5, "partition")]
    sizes: dict[Site, float] = {"qkv": 3.0, "residual": 1.0, "input": 1.0}
    layers, held = r.choice((2, 3)), r.choice((1, 3))
    link = HostLink(rate=r.choice((0.5, 2.0)), forward=r.random() * layers, backward=2 * r.random() * layers)
    swap = Swap(sizes, {"qkv": layers, "residual": layers, "input": layers - 1}, link)

    def kept(site: Site, count: int) -> float:
        return saved(Item(site, 0.0, sizes[site]), count, held)

    for lacking in (0.2, 2.0, 5.0, 9.0, 14.0):
        best = None
        for again, add, part, q, a, x in itertools.product(range(layers + 1), repeat=6):
            if again + q > layers or add + part + a > layers or x > layers - 1:
                continue
            saves = sum(saved(item, n, held) for item, n in zip(items, (again, add, part)))
            saves += kept("qkv", q) + kept("residual", a) + kept("input", x)
            seconds = sum(item.seconds * n for item, n in zip(items, (again, add, part)))
            seconds += link.seconds(3.0 * q + a + x)
            best = seconds if saves >= lacking and (best is None or seconds < best) else best
        found = cover(items, layers, held, lacking, after={}, swap=swap)
        assert (found is None) == (best is None), lacking
        if found is not None and best is not None:
            counts = {name: found.get(name, 0) for name in ("qkv:swap", "residual:swap", "input:swap")}
            seconds = sum(item.seconds * found.get(item.name, 0) for item in items)
            moved = 3.0 * counts["qkv:swap"] + counts["residual:swap"] + counts["input:swap"]
            saves = sum(saved(item, found.get(item.name, 0), held) for item in items)
            saves += sum(kept(site, counts[f"{site}:swap"]) for site in sizes)
            assert saves >= lacking
            assert best - 1e-9 <= seconds + link.seconds(moved) <= best + 2 * 1.0 / link.rate + 1e-9


def test_many_layers_on_one_stage_are_soon_decided() -> None:
    """22B's 48 on one A100: of 1.6 million nodes the first thousands are within 7 % of the least seconds."""
    sizes = dict.fromkeys(("input", "norm1", "core", "residual", "norm2"), 1e8) | dict.fromkeys(
        ("hidden", "activation"), 4e8) | {"qkv": 3e8}
    costs = {"activation": 5.9e-4, "norm1": 1.5e-4, "norm2": 1.5e-4, "core": 1.18e-3, "hidden": 9.3e-3, "qkv": 7.5e-3,
             "residual": 2.7e-3}
    items = [Item(site, costs[site], sizes[site]) for site in costs]  # type: ignore[arg-type]
    swap = Swap(sizes, dict.fromkeys(sizes, 48), HostLink(32e9, 1.54, 3.17))  # type: ignore[arg-type]
    started = time.process_time()
    counts = cover(items, 48, 1.0, 56e9, after=AFTER, swap=swap)
    assert time.process_time() - started < 3 and counts is not None
    moved = sum(n * sizes[name.partition(":")[0]] for name, n in counts.items() if name.endswith(":swap"))
    seconds = swap.link.seconds(moved) + sum(n * costs[name] for name, n in counts.items() if ":" not in name)
    assert sum(max(n - 1, 0) * sizes[name.partition(":")[0]] for name, n in counts.items()) >= 56e9
    assert seconds < 0.0152  # of a micro-batch of 4.7 s


# ---------------------------------------------------------------- shipped runs

RUNS = ["runs/frontier-22b", "runs/frontier-175b", "runs/perlmutter-22b"]
"""All of them: ``benchmarks/activation_plans.py``."""


def planned(name: str) -> tuple[Case, Machine]:
    config = load(name).config
    return replace(case_of(config)[0], recompute="none", dropped=()), machine_of(config)


def most(case: Case, machine: Machine) -> float:
    return max(stage.total for stage in plan_memory(case, machine))


@pytest.mark.parametrize("name", RUNS)
def test_at_equal_memory_a_plan_is_faster_than_full_and_not_slower_than_selective(name: str) -> None:
    case, machine = planned(name)
    for policy in ("full", "selective"):
        other = replace(case, recompute=policy)
        limit = most(other, machine)
        equal = replace(machine, cluster=replace(machine.cluster, memory_gb=limit / 1e9))
        plan = replace(case, dropped=plan_activations(case, equal))
        assert most(plan, machine) <= limit * (1 + 1e-9)
        ours, theirs = (plan_step(c, machine).seconds for c in (plan, other))
        assert ours < theirs if policy == "full" else ours <= theirs


@pytest.mark.parametrize("name", RUNS)
def test_the_plan_fits_the_device_where_full_recompute_does(name: str) -> None:
    case, machine = planned(name)
    plan = replace(case, dropped=plan_activations(case, machine))
    limit = machine.cluster.memory_gb * 1e9
    assert most(plan, machine) <= limit
    assert plan_step(case, machine).seconds <= plan_step(plan, machine).seconds
    assert (most(case, machine) <= limit) == (not any(plan.dropped))


def test_stages_that_hold_more_micro_batches_recompute_more() -> None:
    case, machine = planned("runs/frontier-175b")
    dropped = plan_activations(case, machine)
    by_stage = [sum(len(dropped[i]) for i in range(start, stop)) for start, stop in case.layer_ranges]
    assert by_stage[0] > by_stage[4] > by_stage[-1] == 0


def test_the_plan_is_shown() -> None:
    case, machine = planned("runs/frontier-175b")
    dropped = plan_activations(case, machine)
    lines = describe(replace(case, dropped=dropped))
    first = [site for site in RECOMPUTED if site in dropped[0]]
    assert lines[0].startswith("stage 0: ") and all(f"{site} " in lines[0] for site in first)
    assert lines[0].endswith(f" of {case.chunks[0]} layers") and lines[-1].endswith("to 15: nothing")


def test_a_budget_is_kept() -> None:
    case, machine = planned("runs/frontier-22b")
    budget = 0.5 * stage_memory(case, machine, 0).activations
    plan = replace(case, dropped=plan_activations(case, machine, budget=budget))
    for stage in plan_memory(plan, machine):
        assert stage.activations + stage.working <= budget
    assert any(plan.dropped)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_sites_cost_what_a_forward_does(sequence_parallel: bool) -> None:
    """All of them and the last product are the layer's forward pass; the launches of its kernels are counted apart."""
    case, machine = planned("runs/frontier-175b")
    case = replace(case, sequence_parallel=sequence_parallel, engine=replace(case.engine, tensor_overlap="none"))
    machine = replace(machine, hardware=replace(machine.hardware, launch_us=0.0))
    rates, links, group = Rates.of(machine), Links.of(machine), span(machine, case.tp, 1)
    layer = model_spec(case.model).layers[0]
    costs = site_costs(case, layer, rates, links, group)
    whole = layer_cost(case, layer, rates, links, group)
    outputs, inputs = layer.dense.down.product(case.tp)
    tokens = case.model.seq_length * case.micro_batch
    stream = tokens * case.model.hidden_size * case.width / (case.tp if sequence_parallel else 1)
    last = rates.product(tokens, outputs, inputs, width=case.width) + rates.stream(3 * stream, 0)
    assert sum(c.backward for c in costs.values()) + last == pytest.approx(whole.forward, rel=1e-9)
    exits = 3 / 4 if sequence_parallel else 1 / 2  # of two entries and two exits all but the last exit
    assert sum(c.backward_tensor for c in costs.values()) == pytest.approx(exits * whole.forward_tensor, rel=1e-9)


def test_the_backward_passes_take_what_the_sites_cost() -> None:
    case, machine = planned("runs/frontier-175b")
    sites = ("core", "hidden", "norm2")
    costs = site_costs(
        case, model_spec(case.model).layers[0], Rates.of(machine), Links.of(machine), span(machine, case.tp, 1)
    )
    plan = replace(case, dropped=(*(sites,) * 4, *((),) * (case.model.num_layers - 4)))
    first, second = (
        (c.backward + c.backward_tensor) - (b.backward + b.backward_tensor)
        for c, b in zip(chunk_costs(plan, machine)[:2], chunk_costs(case, machine)[:2])
    )
    each = sum(costs[site].backward + costs[site].backward_tensor for site in ("core", "hidden", "norm2"))
    assert case.chunks[0] >= 4 and first == pytest.approx(4 * each, rel=1e-9) and second == 0.0


def test_recomputed_operations_are_counted() -> None:
    """All sites and the last product are what full recompute executes."""
    model = load("models/gpt-22b").config.model
    everything = hardware_flops(model, "none", 2, (RECOMPUTED,) * model.num_layers)
    down = 2 * model.seq_length * model.hidden_size * model.ffn_size * model.num_layers
    assert everything + down == hardware_flops(model, "full", 2)
    core = hardware_flops(model, "none", 2, (("core", "norm1"),) * model.num_layers)
    assert core == hardware_flops(model, "selective", 2)


# ---------------------------------------------------------------- the configuration


def test_the_plan_is_in_the_configuration_and_is_used_again(tmp_path: Path) -> None:
    config = load("runs/frontier-175b", ["activations.policy=plan"]).config
    assert not problems(config)
    filled = with_activation_plan(config)
    assert len(filled.activations.layers) == config.model.num_layers and any(filled.activations.layers)
    assert with_activation_plan(filled) is filled
    path = tmp_path / "config.toml"
    path.write_text(to_toml(filled))
    again = load(str(path)).config
    assert again.activations == filled.activations and case_of(again)[0].dropped == filled.activations.choices


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"activations.layers": ("norm1",)}, 'are for policy "plan", and it is "full"'),
        ({"activations.policy": "plan", "activations.layers": ("norm1",)}, "has 1 entries, and the model has 96"),
        ({"activations.policy": "plan", "cluster.memory_gb": 0.0}, "needs to know the device"),
    ],
)
def test_refusals(changes: dict[str, Any], expected: str) -> None:
    (found,) = problems(with_values(load("runs/frontier-175b").config, changes))
    assert expected in found


# ---------------------------------------------------------------- a run


def make_engine(
    layers: tuple[str, ...], *, schedule: str = "1f1b", chunks: int = 1, dtype: Any = "fp32"
) -> NativeEngine:
    config = RunConfig(
        engine="native",
        model=ModelConfig(num_layers=4, hidden_size=16, num_attention_heads=2, vocab_size=31, seq_length=8,
                          hidden_dropout=0.1, attention_dropout=0.1),
        layout=LayoutConfig(vocab_padding_multiple=1, pipeline_schedule=schedule, virtual_pipeline_size=chunks),
        activations=ActivationsConfig(policy="plan" if layers else "none", layers=layers),
        batch=BatchConfig(micro_batch_size=1, global_batch_size=3), precision=PrecisionConfig(dtype=dtype),
        backend=BackendConfig(device="cpu", attention="math", own_kernels="off"),
    )
    ctx = ParallelContext.single()
    if chunks > 1:
        ctx = replace(ctx, topology=replace(ctx.topology, vp=chunks, folded=schedule == "zb-v"))
    engine = build_engine(config, ctx, torch_providers())
    assert isinstance(engine, NativeEngine)
    return engine


LAYERS = ("norm1+norm2+activation", "", "+".join(RECOMPUTED), "core+residual+norm2")


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("1f1b", 2), ("zb-h1", 1), ("zb-v", 2)])
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_plan_trains_as_keeping_everything_does(schedule: str, chunks: int, dtype: str) -> None:
    """Equal to the bit over three steps, dropout on."""
    tokens = torch.randint(0, 31, (3, 1, 9), generator=torch.Generator().manual_seed(1))
    batches = [MicroBatch((i,), tokens=t[:, :-1], labels=t[:, 1:]) for i, t in enumerate(tokens)]
    plain, plan = (make_engine(x, schedule=schedule, chunks=chunks, dtype=dtype) for x in ((), LAYERS))
    for step in range(3):
        a, b = (engine.train_step(batches, step=step, lr=1e-2) for engine in (plain, plan))
        assert (a.loss, a.grad_norm) == (b.loss, b.grad_norm)
    ours = {record.name: p for record, p in plan.named_parameters()}
    assert all(torch.equal(p, ours[record.name]) for record, p in plain.named_parameters())


def test_an_unknown_site_is_refused() -> None:
    with pytest.raises(ConfigError, match="'norm3' is no site that can be recomputed"):
        make_engine(("norm3", "", "", ""))
