"""A run that cannot fit is refused before any process starts, with the numbers and a layout that does fit."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from megatron_port.api import run_training
from megatron_port.cli.main import main
from megatron_port.core.config.checks import problems
from megatron_port.core.config.features import OffloadConfig
from megatron_port.core.config.loader import load
from megatron_port.core.config.schema import OptimizerConfig, RunConfig
from megatron_port.core.dist.rank import ProcessInfo
from megatron_port.run.elastic import starved_stages
from megatron_port.tools.plan.case import case_of, machine_of
from megatron_port.tools.plan.elements import stage_elements
from megatron_port.tools.plan.engines import rule_cost
from megatron_port.tools.plan.fastest import ways_to_fit
from megatron_port.tools.plan.guard import memory_problem, planned_memory
from megatron_port.tools.plan.memory import offloaded, stage_memory
from megatron_port.tools.plan.text import make_plan

TOO_FEW = "layout.pipeline_parallel_size=4"
ONE_DEVICE = ["cluster.nodes=1", "cluster.gpus_per_node=1", "layout.pipeline_parallel_size=1"]
SMALL = """
extends = ["models/gpt-tiny"]
name = "guarded"
engine = "native"
[layout]
tensor_parallel_size = 2
zero_stage = 0
[batch]
global_batch_size = 8
[data]
synthetic = true
[cluster]
name = "toy"
memory_gb = 0.001
[hardware]
device = "toy"
reserved_gb = 0.0
"""


def flags(text: str) -> list[str]:
    """The ``a.b=value`` of every --set in a message, the last (how to start all the same) left out."""
    return re.findall(r"--set (\S+?)[.;]?(?=\s)", text + " ")[:-1]


def test_the_message_has_numbers_limit_and_a_layout_that_passes() -> None:
    loaded = load("runs/frontier-175b", [TOO_FEW]).config
    text = memory_problem(loaded)
    plan = make_plan(loaded, neighbours=False)
    over = (plan.fullest.total - plan.limit) / 1e9
    assert f"{over:.1f} GB too much" in text and "a device of frontier has 64 GB (cluster.memory_gb)" in text
    assert "The cheapest change that fits: " in text
    fixed = load("runs/frontier-175b", [TOO_FEW, *flags(text)]).config
    assert not problems(fixed) and memory_problem(fixed) == "" and make_plan(fixed, neighbours=False).fits


def test_more_devices_are_named_where_no_layout_fits() -> None:
    text = memory_problem(load("runs/frontier-22b", ONE_DEVICE).config)
    assert "No layout on 1 device fits; on 2 the fastest is " in text


@pytest.mark.parametrize("overrides", [
    ["cluster.memory_gb=0"], ["hardware.device=", "hardware.matmul_tflops=0"], ["launch.memory_check=off"],
    ["layout.tensor_parallel_size=5"],
])
def test_silent_where_nothing_is_known_or_the_run_is_not_legal(overrides: list[str]) -> None:
    assert memory_problem(load("runs/frontier-175b", [TOO_FEW, *overrides]).config) == ""


def test_an_elastic_run_is_judged_by_the_layout_that_it_takes() -> None:
    config = load("runs/frontier-175b", ["layout.elastic=true", "cluster.nodes=0"]).config
    assert memory_problem(config, 128) == ""
    planned = planned_memory(config, 16)  # tp 4 × pp 4: the layout that 16 ranks get
    assert planned is not None and planned[0].world == 16
    assert "cannot fit" in memory_problem(config, 16)


def test_without_rates_the_verdict_stands_and_no_layout_is_looked_for() -> None:
    config = load("runs/frontier-175b", [TOO_FEW]).config
    config = replace(config, hardware=replace(config.hardware, memory_bandwidth_gb=0.0))
    assert "memory_bandwidth_gb is 0.0" in memory_problem(config)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(f'{SMALL}\n[training]\nsteps = 1\n[checkpoint]\nsave_final = false\n')
    return path


def test_train_stops_with_2_before_any_process_meets(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_port.run.local_ranks.run_local", lambda *a, **k: pytest.fail("ranks were started"))
    out = f"output_dir={tmp_path / 'runs'}"
    for arguments in (["--nproc", "2"], ["--dry-run"]):
        assert main(["train", str(small), "--set", out, *arguments]) == 2
        assert "this run cannot fit" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_told_to_it_only_warns(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(small), "--dry-run", "--ignore-memory"]) == 0
    assert "warning: this run cannot fit" in capsys.readouterr().out


def test_starved_stages_are_told_by_plan_dry_run_and_training_alike(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "2 micro-batches for 4 stages: fewer than stages"
    few = ["layout.pipeline_parallel_size=4", "batch.global_batch_size=2", "launch.memory_check=warn",
           "cluster.gpus_per_node=8", f"output_dir={tmp_path}"]
    config = load(str(small), few).config
    assert text in starved_stages(config, 8)
    enough = load(str(small), [*few, "batch.global_batch_size=4"]).config
    assert not starved_stages(config, 7) and not starved_stages(enough, 8)
    two = load(str(small), [*few, "batch.global_batch_size=8", "layout.elastic=true"]).config
    assert not starved_stages(two, 8) and text in starved_stages(two, 32)  # four replicas share the batch
    sets = [word for one in few for word in ("--set", one)]
    assert main(["train", str(small), "--dry-run", *sets]) == 0
    assert f"warning: {text}" in capsys.readouterr().out
    monkeypatch.setattr("megatron_port.run.session.open_session", lambda *a, **k: pytest.fail("reached"))
    with pytest.raises(pytest.fail.Exception, match="reached"):
        run_training(config, cast(ProcessInfo, SimpleNamespace(rank=0, world_size=8)))
    assert f"warning: {text}" in capsys.readouterr().err


def test_launch_refuses_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "render", "runs/frontier-175b", "--set", TOO_FEW]) == 2
    assert "this run cannot fit" in capsys.readouterr().err
    assert main(["launch", "render", "runs/frontier-175b", "--set", TOO_FEW, "--set", "launch.memory_check=warn"]) == 0
    assert "launch.memory_check=warn" in capsys.readouterr().out


def test_default_runs_are_not_judged() -> None:
    assert planned_memory(RunConfig()) is None


@pytest.mark.parametrize("name", [
    "llama-70b-1node-8gpu", "llama-8b-1gpu-offload", "gpt-13b-1gpu-offload", "frontier-22b-zero3",
    "frontier-175b-16nodes",
])
def test_shipped_runs_with_sharded_or_offloaded_state_fit(name: str) -> None:
    config = load(f"runs/{name}").config
    assert not problems(config, world_size=case_of(config)[0].world)
    assert memory_problem(config) == "" and make_plan(config, neighbours=False).fits
    without = replace(config, offload=OffloadConfig(), layout=replace(config.layout, zero_stage=1))
    assert "cannot fit" in memory_problem(without)


def test_ways_to_fit_are_named_cheapest_first_and_do_fit() -> None:
    config = load("runs/frontier-175b", [TOO_FEW, "engine=native"]).config
    case, machine = case_of(config)[0], machine_of(config)
    ways = ways_to_fit(config, case, machine, count=9)
    assert [w.seconds for w in ways] == sorted(w.seconds for w in ways)
    changes = [tuple(way.change) for way in ways]
    assert ("layout.zero_stage",) in changes and ("layout.pipeline_parallel_size",) in changes
    for way in ways:
        changed = load("runs/frontier-175b", [TOO_FEW, "engine=native", *flags(f"{way.flags} --set last=1")]).config
        assert not problems(changed) and memory_problem(changed) == ""
    assert ways[0].flags in memory_problem(config)


def test_a_head_in_chunks_is_named_where_logits_are_too_much() -> None:
    config = load("runs/llama-8b-128k-1node", ["model.seq_length=262144", "cluster.memory_gb=83"]).config
    assert "cannot fit" in memory_problem(config)
    ways = ways_to_fit(config, case_of(config)[0], machine_of(config), count=9)
    (way,) = (way for way in ways if "activations.head_chunk" in way.change)
    assert way.change == {"activations.head_chunk": 1024}  # 1,046 tokens have 256 MiB of logits
    chunked = load("runs/llama-8b-128k-1node", [
        "model.seq_length=262144", "cluster.memory_gb=83", "activations.head_chunk=1024"]).config
    assert memory_problem(chunked) == ""
    assert not any("activations.head_chunk" in way.change for way in ways_to_fit(
        chunked, case_of(chunked)[0], machine_of(chunked), count=9))


def test_two_changes_are_named_where_no_single_one_is_enough() -> None:
    config = load("runs/llama-70b-1node-8gpu", ["layout.zero_stage=1", "offload.optimizer=none"]).config
    ways = ways_to_fit(config, case_of(config)[0], machine_of(config))
    assert {"layout.zero_stage", "offload.optimizer"} <= set(ways[0].change) or len(ways[0].change) == 2


def test_offloaded_state_that_the_host_cannot_hold_is_refused() -> None:
    config = load("runs/llama-70b-1node-8gpu", ["hardware.host_memory_gb=500"]).config
    text = memory_problem(config)
    assert "GB of a node's host memory, which has 500 GB" in text and 'offload.optimizer = "nvme"' in text
    assert not make_plan(config, neighbours=False).fits


def test_offload_costs_what_moves_and_what_the_host_updates() -> None:
    """12 bytes of state an element leave the device; 4 go out and 2 come back, and the host touches 30."""
    config = load("runs/gpt-13b-1gpu-offload").config
    case, machine = case_of(config)[0], machine_of(config)
    elements = stage_elements(case, 0)
    here = replace(case, offload="none")
    device = [stage_memory(c, machine, 0).optimizer for c in (case, here)]
    assert device == [0.0, 12.0 * elements]
    found = offloaded(case, machine)
    h = machine.hardware
    moved = elements * max(4 / h.host_link_gb, 30 / h.host_bandwidth_gb) / 1e9
    assert found.seconds == pytest.approx(moved) and found.host == pytest.approx(12 * elements, rel=0.05)
    disk = offloaded(replace(case, offload="nvme"), machine)
    assert disk.seconds == pytest.approx(elements * 12 / h.nvme_write_gb / 1e9)
    assert disk.disk == 12 * elements and disk.host < 0.05 * found.host
    lion = replace(case, offload="nvme", rule=rule_cost(OptimizerConfig(name="lion"), config.model))
    assert offloaded(lion, machine).disk == 8 * elements  # master and momentum
