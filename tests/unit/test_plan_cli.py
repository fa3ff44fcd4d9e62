"""`megatron-port plan`: verdicts, neighbours, refusals; the search; the arithmetic of an envelope, worked."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_port.cli.main import main
from megatron_port.core.config.checks import check, problems
from megatron_port.core.config.layout import with_values
from megatron_port.core.config.loader import load, shipped_names
from megatron_port.core.config.machine import CalibrationConfig, HardwareConfig
from megatron_port.core.errors import ConfigError
from megatron_port.ext.telemetry.flops import model_flops
from megatron_port.tools.plan import arithmetic
from megatron_port.tools.plan.case import case_of, machine_of, machine_problems
from megatron_port.tools.plan.fastest import fastest, kinds_of, refined, states_of
from megatron_port.tools.plan.guard import with_assumed_hardware
from megatron_port.tools.plan.memory import plan_memory
from megatron_port.tools.plan.search import (
    Candidate,
    flags_of,
    fullest,
    is_legal,
    layouts,
    options_of,
    search,
    settings_of,
)
from megatron_port.tools.plan.step import plan_step
from megatron_port.tools.plan.text import make_plan

ROOT = Path(__file__).resolve().parents[2]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", *arguments])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_a_run_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "runs/frontier-175b", "--explain", "--tokens", "300e9", "--set", "data.attention_documents=within",
        "--no-search",
    )
    assert code == 0
    assert "attention within documents" in out
    for word in ("fits", "MFU", "HFU", "compute", "bubble", "node-hours", "6·N·T", "228,882 steps", "scattered over"):
        assert word in out


def test_a_run_that_does_not_fit_says_by_how_much_and_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "runs/frontier-175b", "--nodes", "1", "--set", "layout.pipeline_parallel_size=2")
    assert code == 2
    assert "DOES NOT FIT" in out and "no layout on 8 devices fits" in out
    code, out, _ = run(capsys, "runs/frontier-22b", "--json", "--set", "layout.pipeline_parallel_size=1")
    plan = json.loads(out)
    assert code == 2 and not plan["fits"]
    worst = max(stage["total"] for stage in plan["stages"])
    assert plan["over_bytes"] == pytest.approx(worst - plan["limit_bytes"])
    near = plan["nearest"]
    assert near["bytes"] <= plan["limit_bytes"] and near["tp"] * near["pp"] * near["dp"] == 16
    assert near["seconds"] <= min(way["seconds"] for way in plan["ways"])
    flags = re.findall(r"--set (\S+)", plan["flags"])
    again = make_plan(load("runs/frontier-22b", ["layout.pipeline_parallel_size=1", *flags]).config, neighbours=False)
    assert again.fits and again.step.seconds == pytest.approx(near["seconds"])


def test_neighbours_are_legal_fit_and_are_faster() -> None:
    config = load("runs/frontier-22b").config
    plan = make_plan(config)
    assert plan.neighbours and plan.best is not None and not problems(with_values(config, settings_of(
        config, plan.best.case)))
    for n in (*plan.neighbours, plan.best):
        assert n.step.seconds < plan.step.seconds
        changed = with_values(config, settings_of(config, n.case))
        check(changed)
        again = make_plan(changed, neighbours=False)
        assert again.fits and again.step.seconds == pytest.approx(n.step.seconds)
        assert again.fullest.total == pytest.approx(n.memory.total, rel=1e-3)
    assert plan.best.step.seconds <= min(n.step.seconds for n in plan.neighbours)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["cluster.memory_gb=0"], "cluster.memory_gb is 0.0"),
        (["hardware.memory_bandwidth_gb=0"], "hardware.memory_bandwidth_gb is 0.0"),
        (["cluster.nodes=0"], "nothing says how many devices"),
        (["cluster.nodes=-2"], "at least 1"),
        (["model.vocab_size=2"], "vocab_size 2 is smaller than tensor_parallel_size 4"),
        (["hardware.matmul_tflops=1000"], "nothing reaches more than the peak"),
        (["hardware.node_efficiency=1.5"], "must be a share"),
        (["hardware.nics=0"], "has no network"),
        (["hardware.group_uplinks=8"], "not dragonfly"),
        (["hardware.rails=true"], "give nics and group_uplinks"),
        (["batch.global_batch_size=641"], "does not divide"),
        (["model.hidden_size=12289"], "does not divide"),
    ],
)
def test_nonsense_is_refused_with_a_sentence(
    capsys: pytest.CaptureFixture[str], overrides: list[str], sentence: str
) -> None:
    code, out, err = run(capsys, "runs/frontier-175b", *(x for o in overrides for x in ("--set", o)))
    assert code == 2 and not out and sentence in err


def test_nodes_that_nothing_gives_are_assumed_and_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The fewest that hold one replica. It was an error on the README's own example."""
    file = tmp_path / "mine.toml"
    file.write_text('extends = ["models/gpt2-124m", "clusters/h200"]\n[layout]\ntensor_parallel_size = 4\n'
                    "pipeline_parallel_size = 4\n[batch]\nmicro_batch_size = 4\nglobal_batch_size = 64\n")
    code, out, _ = run(capsys, str(file), "--no-search")
    assert "better" not in out and "best" not in out
    assert code == 0 and out.startswith("planned for 2 nodes of 8 devices: ") and "--nodes N" in out
    assert "on 16 devices (2 nodes" in out
    code, out, _ = run(capsys, str(file), "--no-search", "--set", "training.steps=1000")
    assert code == 0 and " minutes, 0.0" in out  # not "0.000545 days, 0 node-hours"
    code, out, _ = run(capsys, str(file), "--no-search", "--set", "layout.pipeline_parallel_size=1")
    assert code == 0 and out.startswith("planned for 1 node of 8 devices: ") and "dp 2" in out
    code, out, err = run(capsys, str(file), "--no-search", "--json")
    assert code == 0 and json.loads(out)["fits"] and "planned for 2 nodes" in err
    for given in (("--nodes", "4"), ("--set", "layout.data_parallel_size=2")):
        assert "planned for" not in run(capsys, str(file), "--no-search", *given)[1]


def test_readmes_own_run_is_planned_with_its_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As it is printed there: no nodes, and data that was not prepared."""
    block = re.search(r"^cat > mine.toml <<'EOF'\n(.*?)^EOF$", (ROOT / "README.md").read_text(), re.S | re.M)
    assert block is not None
    (tmp_path / "mine.toml").write_text(block.group(1))
    page = tmp_path / "plan.html"
    code, out, _ = run(capsys, str(tmp_path / "mine.toml"), "--report", str(page))
    assert code == 0 and "best      of all layouts" in out and "planned for 1 node of 8 devices" in out
    assert "<h1>mine: 124,439,808 parameters on 8 devices of h200</h1>" in page.read_text()


@pytest.mark.parametrize("section", [HardwareConfig, CalibrationConfig], ids=["hardware", "calibration"])
def test_no_number_of_a_machine_is_negative(section: type) -> None:
    """Every number of the description, those that are still to be added too, has a range that ends at 0 or above."""
    room = section.__name__.removesuffix("Config").lower()
    config = load("runs/frontier-175b", []).config
    checked = 0
    for field in dataclasses.fields(section):
        value = getattr(getattr(config, room), field.name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            wrong = replace(config, **{room: replace(getattr(config, room), **{field.name: type(value)(-3)})})
            found = [p for p in problems(wrong) if f"{room}.{field.name} is -3" in p]
            assert len(found) == 1, field.name
            checked += 1
    assert checked >= 3


def test_other_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"no \[hardware\]"):
        make_plan(load("runs/quickstart", ["cluster.nodes=1"]).config)
    assert "at least 1 node" in run(capsys, "runs/frontier-175b", "--nodes", "0")[2]
    assert "no budget" in run(capsys, "runs/frontier-175b", "--tokens", "-5")[2]


def test_fractional_accumulation_is_for_plans_only_and_labelled(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("runs/frontier-1t", "--nodes", "384", "--set", "batch.global_batch_size=8000")
    assert run(capsys, *arguments)[0] == 2
    code, out, _ = run(capsys, *arguments, "--fractional", "--no-search")
    assert code == 0 and "planned with 1334" in out and "no trainer runs this" in out


@pytest.mark.parametrize("name", ["runs/quickstart", "runs/gpt2-124m-1gpu"])
def test_a_cluster_without_hardware_is_planned_by_defaults_that_are_named(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    code, out, _ = run(capsys, name, "--no-search")
    assert code == 0 and "has no [hardware] section" in out and "a default and no measurement" in out
    assert "step      0.00 s" not in out and "bench calibrate" in out
    config = load(name, ["cluster.memory_gb=7", "cluster.gpus_per_node=4"]).config
    known, said = with_assumed_hardware(config)
    assert said and known.cluster.memory_gb == 7 and known.cluster.gpus_per_node == 4
    assert not machine_problems(machine_of(known))
    assert with_assumed_hardware(known) == (known, "")


def test_the_search_over_every_axis_finds_the_best_of_1t_on_3072_gcds_in_seconds() -> None:
    """All engines, schedules, ZeRO stages and shards, offload, chunks, plans of activations: 10 s are the goal."""
    config = load("runs/frontier-1t").config
    case, _ = case_of(config)
    machine, started = machine_of(config), time.process_time()
    found = fastest(config, case, machine)
    assert time.process_time() - started < 20  # of a core that others use too
    assert [c.step.seconds for c in found] == sorted(c.step.seconds for c in found)
    best = found[0]
    assert best.step.seconds < 0.68 * plan_step(case, machine).seconds and best.case.engine.name == "native"
    assert best.case.world == 3072 and max(m.total for m in plan_memory(best.case, machine)) <= 64e9
    assert {c.case.engine.name for c in found} == {"native", "deepspeed"}
    assert best.case.offload_fraction < 1 < best.case.tensor_chunks  # refined: no more on the host than has to be
    flags = flags_of(config, case, best.case)
    assert "--set offload.fraction=0.95 " in flags + " " and "--set layout.tp_overlap_chunks=4" in flags
    as_a_whole = replace(best.case, offload_fraction=1.0, tensor_chunks=1)
    assert best.step.seconds < plan_step(as_a_whole, machine).seconds
    less = replace(best.case, offload_fraction=0.9)
    assert max(m.total for m in plan_memory(less, machine)) > 64e9


def test_refined_layouts_are_faster_fit_and_are_legal() -> None:
    config = load("runs/frontier-22b", ["cluster.nodes=2", "engine=native"]).config
    case, machine = case_of(config)[0], machine_of(config)
    heavy = replace(case, pp=4, dp=4, tp=1, split=(14, 12, 12, 10), micro_batches=case.global_batch // 4,
                    offload="cpu", recompute="full")
    found = Candidate(case=heavy, step=plan_step(heavy, machine), memory=fullest(heavy, machine))
    better = refined(config, found, machine)
    assert better.step.seconds < found.step.seconds and better.fits(machine) and is_legal(config, better.case)
    assert better.case.split == (12, 12, 12, 12)
    assert 0 < better.case.offload_fraction < 1 and better.case.tensor_chunks == 1  # without tensor parallelism
    again = refined(config, better, machine)
    assert again.step.seconds == better.step.seconds


def test_the_search_over_every_axis_is_exact() -> None:
    """Beside every layout of a small run, planned one by one: none that fits is faster."""
    config = load("runs/frontier-22b", ["cluster.nodes=1", "layout.pipeline_parallel_size=4", "engine=native",
                                        "batch.global_batch_size=16"]).config
    case, _ = case_of(config)
    machine = machine_of(config)
    found = fastest(config, case, machine, finalists=1)
    least = math.inf
    for kind in kinds_of(config, case, case.world):
        for one in layouts(kind.case, replace(kind.options, schedules=kind.schedules, micro=(1, 4))):
            for policy in ("none", "full"):
                for state in states_of(kind, one, machine):
                    other = state.of(replace(one, recompute=policy))
                    seconds = plan_step(other, machine, quick=True).seconds
                    if seconds < least and fullest(other, machine).total <= 64e9 and is_legal(config, other):
                        least = seconds
    assert plan_step(found[0].case, machine, quick=True).seconds <= least * (1 + 1e-9)
    assert found[0].case.zero_stage == 3 and found[0].case.dropped  # room for what the other stages recompute


def test_the_search_beside_a_run_plans_every_layout_of_its_engine() -> None:
    config = load("runs/frontier-175b").config
    case, _ = case_of(config)
    machine = machine_of(config)
    options = options_of(config, case)
    found = search(case, machine, options)
    assert [c.step.seconds for c in found] == sorted(c.step.seconds for c in found)
    assert all(c.fits(machine) and c.case.world == 128 for c in found)
    papers = [c for c in found if (c.case.tp, c.case.pp, c.case.recompute, c.case.micro_batch) == (4, 16, "full", 1)]
    assert papers and found[0].step.seconds < papers[0].step.seconds
    assert all(c.global_batch == c.dp * c.micro_batch * c.micro_batches for c in layouts(case, options))
    for c in found[:2]:
        assert c.memory.total == max(m.total for m in plan_memory(c.case, machine)) == fullest(c.case, machine).total


def test_worked_numbers_of_an_envelope() -> None:
    """Llama-2 70B's memory, the widest tensor parallelism by bandwidth, and 175B's days, as printed elsewhere."""
    llama = arithmetic.simple_memory(70e9, layers=80, hidden=8192, sequence=4096, batch=8)
    assert [round(x / 1e9) for x in (llama.weights, llama.gradients, llama.optimizer, llama.activations)] == [
        140, 140, 840, 730,
    ]
    assert round(llama.total / 1e9) == 1850 and llama.devices(80e9) == 24 and llama.devices(24e9) == 78
    widest = arithmetic.widest_tensor_parallelism
    assert widest(8192, peak=330e12, link=32e9) == pytest.approx(2.4, abs=0.05)
    assert widest(8192, peak=989e12, link=450e9) == pytest.approx(11.2, abs=0.05)
    assert widest(8192, peak=989e12, link=900e9) == pytest.approx(22, abs=0.5)
    machine: dict[str, Any] = {"peak": 312e12, "utilisation": 0.5, "devices": 1024}
    assert arithmetic.days(arithmetic.training_flops(175e9, 300e9), **machine) == pytest.approx(22.8, abs=0.05)
    model = load("models/gpt-175b").config.model
    assert arithmetic.days(model_flops(model) / 2048 * 300e9, **machine) == pytest.approx(23.4, abs=0.05)
    assert arithmetic.bubble_fraction(128, 512) == pytest.approx(0.248, abs=0.0005)
    assert arithmetic.bubble_fraction(8, 64, 3) == 7 / 192
    layer: dict[str, Any] = {"sequence": 2048, "batch": 4, "hidden": 6144, "heads": 64}
    assert arithmetic.layer_activations(**layer) == pytest.approx(2048 * 4 * 6144 * (34 + 5 * 64 * 2048 / 6144))
    assert arithmetic.layer_activations(**layer, tensor=8, sequence_parallel=True, scores=False) * 48 == pytest.approx(
        9.56 * 2**30, rel=0.001
    )


def test_explain_works_the_envelope_of_llama_2_70b(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """140 + 140 + 840 + 730 GB with 70 billion parameters; the model has 68.98."""
    path = tmp_path / "run.toml"
    path.write_text(
        'extends = ["models/llama2-70b", "clusters/selene"]\nengine = "native"\n[layout]\ntensor_parallel_size = 8\n'
        "pipeline_parallel_size = 8\n[batch]\nmicro_batch_size = 8\nglobal_batch_size = 8\n[cluster]\nnodes = 8\n"
        "memory_gb = 80.0\n"
    )
    _, out, _ = run(capsys, str(path), "--explain", "--no-search")
    assert "1 micro-batch for 8 stages: fewer than stages" in out
    assert "68,976,648,192 parameters" in out
    assert "6 + 4 + 4): 0.9657 TB, 16 (ZeRO, arXiv 1910.02054: 2 + 2 + 12): 1.104 TB, 18 (native here): 1.242 TB" in out
    assert "a node has 8: at most 8" in out
    assert "weights 138 + gradients 138 + optimizer 827.7 + activations 730.1 = 1834 GB: 23 devices of 80 GB" in out


@pytest.mark.parametrize("name", [n for n in shipped_names() if n.startswith("runs/")])
def test_every_shipped_run_on_a_described_cluster_fits(name: str) -> None:
    config = load(name).config
    if not config.hardware.device:
        pytest.skip(f"{config.cluster.name} has no [hardware]")
    plan = make_plan(config, neighbours=False)
    assert plan.fits, f"stage {plan.fullest.stage} needs {plan.fullest.total / 1e9:.1f} GB"


@pytest.mark.parametrize("name", [n for n in shipped_names() if n.startswith("clusters/")])
def test_every_described_cluster_can_be_planned_for(name: str) -> None:
    config = load(name).config
    if config.hardware.device:
        assert machine_of(config).cluster.name == config.cluster.name


def test_planning_needs_no_torch() -> None:
    modules = "megatron_port.tools.plan.text, megatron_port.tools.plan.text"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
