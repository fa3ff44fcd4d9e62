"""The quick start's decisions: on what it trains, and whether the result is sound; and that its rate is."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from megatron_port.core.config.checks import problems
from megatron_port.core.config.loader import load
from megatron_port.ext.telemetry.flops import active_count
from megatron_port.run.config_hash import config_hash

ROOT = Path(__file__).resolve().parents[2]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


plan = script("quickstart_plan")


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_on_a_cpu_it_is_eight_ranks_or_four(gpus: int, small: bool) -> None:
    choice = plan.choose("cpu", gpus, small=small)
    assert choice.run == "runs/quickstart" and choice.ranks == (4 if small else 8)
    assert load(choice.run, choice.overrides).config.backend.device == "cpu"
    assert choice.says.startswith("the CPU") and ("not used" in choice.says) == bool(gpus)


@pytest.mark.parametrize("device", ["cuda", "rocm"])
@pytest.mark.parametrize(
    ("gpus", "small", "ranks"),
    [(1, False, 1), (2, False, 2), (3, False, 2), (4, False, 4), (6, False, 4), (8, False, 8), (16, False, 8),
     (8, True, 4), (2, True, 2)],
)
def test_on_gpus_it_is_one_rank_each(device: str, gpus: int, small: bool, ranks: int) -> None:
    """What was asked for is what the run gets: the file that it named before set backend.device = "cpu"."""
    choice = plan.choose(device, gpus, small=small)
    config = load(choice.run, choice.overrides).config
    layout = config.layout
    sizes = (layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.data_parallel_size)
    assert choice.ranks == ranks <= gpus and sizes[0] * sizes[1] * sizes[2] == ranks
    assert config.backend.device == device and not problems(config, world_size=ranks)
    assert f"{ranks} " in choice.says and ("CUDA" if device == "cuda" else "ROCm") in choice.says
    assert ("not used" in choice.says) == (gpus > ranks)
    assert ("one rank is not split" in choice.says) == (ranks == 1)


def test_ranks_share_a_gpu_only_where_that_was_asked_for() -> None:
    choice = plan.choose("cuda", 1, share=True)
    config = load(choice.run, choice.overrides).config
    assert choice.ranks == 8 and "share (SHARE_GPU=1)" in choice.says
    assert (config.engine, config.layout.zero_stage, config.backend.device) == ("native", 0, "cuda")
    assert not problems(config, world_size=8)
    assert plan.choose("cuda", 8, share=True) == plan.choose("cuda", 8)
    assert plan.choose("cuda", 2, small=True, share=True).ranks == 4


@pytest.mark.parametrize(("device", "gpus"), [("cpu", 0), ("cuda", 8)])
def test_the_other_engine_trains_the_usual_run(device: str, gpus: int) -> None:
    usual, other = plan.choose(device, gpus), plan.choose(device, gpus, engine="deepspeed")
    config = load(other.run, other.overrides).config
    assert other == replace(usual, overrides=(*usual.overrides, "engine=deepspeed")) and config.engine == "deepspeed"
    assert not problems(config, world_size=8) and load(usual.run, usual.overrides).config.engine == "native"
    for asked in ("shard", "moe", "long", "share"):
        with pytest.raises(ValueError, match=f"{asked.upper()}.*=1 is for the native engine"):
            plan.choose(device, gpus, engine="deepspeed", **{asked: True})
    with pytest.raises(ValueError, match="ENGINE=other is not one of native, deepspeed"):
        plan.choose(device, gpus, engine="other")


def test_sharded_it_is_replicas_with_zero_3_and_offload() -> None:
    choice = plan.choose("cpu", 0, shard=True)
    config = load(choice.run, list(choice.overrides)).config
    layout = config.layout
    assert (layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.data_parallel_size) == (1, 1, 8)
    assert (choice.ranks, layout.zero_stage, config.offload.optimizer) == (8, 3, "cpu")
    assert not problems(config, world_size=8)
    small = plan.choose("cpu", 0, shard=True, small=True)
    assert small.ranks == 4 and not problems(load(small.run, list(small.overrides)).config, world_size=4)
    with pytest.raises(ValueError, match="SHARD=1 is a run for the CPU"):
        plan.choose("cuda", 8, shard=True)


def test_with_experts_they_are_divided_over_the_replicas() -> None:
    """The dense twin has as many parameters for a token, but for the router's."""
    for small, ranks in ((False, 8), (True, 4)):
        choice = plan.choose("cpu", 0, moe=True, small=small)
        config = load(choice.run, list(choice.overrides)).config
        layout = config.layout
        assert choice.ranks == ranks == 2 * layout.data_parallel_size and layout.pipeline_parallel_size == 2
        assert layout.expert_parallel_size == layout.data_parallel_size and not problems(config, world_size=ranks)
    twin = load("runs/quickstart-moe-dense").config
    assert not problems(twin, world_size=8)
    router = config.model.num_layers * 8 * config.model.hidden_size
    biases = config.model.num_layers * config.model.hidden_size  # of a second expert's output
    assert active_count(config.model) - active_count(twin.model) == router + biases
    for other in ({"shard": True}, {"device": "cuda"}):
        with pytest.raises(ValueError, match="MOE=1"):
            plan.choose(**{"device": "cpu", "gpus": 8, "moe": True, **other})


def test_long_sequences_are_shared_by_four_ranks() -> None:
    for small, replicas in ((False, 2), (True, 1)):
        choice = plan.choose("cpu", 0, long=True, small=small)
        config = load(choice.run, list(choice.overrides)).config
        layout = config.layout
        assert (layout.context_parallel_size, layout.data_parallel_size, choice.ranks) == (4, replicas, 4 * replicas)
        assert config.data.attention_documents == "within" and not problems(config, world_size=choice.ranks)
        usual = load("runs/quickstart").config
        assert config.batch.global_batch_size * config.model.seq_length == 32 * usual.model.seq_length
    with pytest.raises(ValueError, match="MOE=1 and LONG=1 are 2 runs"):
        plan.choose("cpu", 0, long=True, moe=True)


@pytest.mark.parametrize(
    ("device", "gpus", "words"),
    [("cuda", 0, "torch sees no GPU"), ("rocm", 0, "torch sees no GPU"), ("gpu", 1, "not one of cpu, cuda, rocm")],
)
def test_without_the_device_nothing_is_chosen(device: str, gpus: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan.choose(device, gpus)


def test_a_gpu_run_is_the_cpu_run_on_another_device() -> None:
    """Model, data, batch, rate and precision are the same, so the losses can be compared; the folder is another."""
    cpu, gpu = load("runs/quickstart").config, load("runs/quickstart-gpu").config
    assert (cpu.model, cpu.data, cpu.batch, cpu.optimizer, cpu.precision, cpu.training) == (
        gpu.model, gpu.data, gpu.batch, gpu.optimizer, gpu.precision, gpu.training)
    assert cpu.name != gpu.name


def test_a_gpu_that_is_not_there_stops_the_script(tmp_path: Path) -> None:
    """It trained on the CPU for two minutes, and said nothing of it."""
    device = "cuda"
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "quickstart.py")], capture_output=True, text=True, timeout=300,
        env={**os.environ, "DEVICE": device, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}, cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 3, done.stdout + done.stderr
    assert f"DEVICE={device}" in done.stderr and "Nothing was trained" in done.stderr
    assert "Traceback" not in done.stderr and "$ megatron-port" not in done.stdout


FALLING = {s: 5.5 - s / 100 for s in range(1, 151)}


def test_a_sound_run_has_no_faults() -> None:
    assert plan.faults(FALLING, [5.5, 2.6], 3.33) == []
    assert plan.faults({**FALLING, 2: FALLING[1]}, [5.5, 2.6], 3.33) == []


@pytest.mark.parametrize(
    ("losses", "validation", "words"),
    [
        ({**FALLING, 14: 9.4}, 2.6, "rose to 9.400 at step 14, above its start 5.490"),
        ({**FALLING, 3: 5.495}, 2.6, "rose to 5.495 at step 3"),
        ({**FALLING, 7: float("nan")}, 2.6, "not finite at step 7 (1 of 150 steps)"),
        ({**FALLING, 7: float("inf")}, 2.6, "not finite at step 7"),
        (FALLING, 3.1, "validation loss 3.100 is not clearly under the unigram entropy 3.330"),
        (FALLING, float("nan"), "validation loss nan"),
    ],
)
def test_an_unsound_run_is_told(losses: dict[int, float], validation: float, words: str) -> None:
    (fault,) = plan.faults(losses, [5.5, validation], 3.33)
    assert words in fault


def test_the_loss_never_rises_above_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped rate, through the warm-up and beyond, on this project's own text instead of the fetched corpus.

    Without warm-up the loss rises above its start with any of three seeds; at 4e-3 after 15 steps of it, with two of
    four, to 6.2 and 9.9. A quarter of the batch shows it as well. One process stands for the layout: all of them train
    alike. Every edit of the text draws other batches: with nine seeds the last batch's loss is 0.54 to 0.61 of the
    first, and the mean of the last five 0.57 to 0.60.
    """
    from megatron_port.cli.main import main
    from megatron_port.ext.telemetry.metrics import read_metrics

    texts = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "megatron_port").rglob("*.py"))]
    (tmp_path / "text.txt").write_text("\n\n\n".join(path.read_text() for path in texts))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    assert main(["data", "prepare", "own", "--input", "text.txt", "--tokenizer", "byte", "--blank-lines", "2"]) == 0
    shipped = load("runs/quickstart").config
    assert shipped.optimizer.decay_steps == shipped.training.steps  # so that a shorter run has the same rates
    steps, batch = 32, shipped.batch.global_batch_size // 4
    assert shipped.optimizer.warmup_steps < steps
    changes = ["layout.tensor_parallel_size=1", "layout.pipeline_parallel_size=1", "layout.data_parallel_size=1",
               "engine=native", f"batch.micro_batch_size={batch}", f"batch.global_batch_size={batch}",
               "checkpoint.save_interval=0", "checkpoint.save_final=false", "training.eval_batches=0",
               "training.eval_interval=0",
               f"training.steps={steps}"]
    sets = [word for change in changes for word in ("--set", change)]
    assert main(["train", "runs/quickstart", "--data", "own", *sets]) == 0
    losses = {int(x["step"]): float(x["loss"]) for x in read_metrics(Path("runs/quickstart/metrics.jsonl"))}
    assert len(losses) == steps and max(losses.values()) == losses[1]
    assert sum(losses[steps - i] for i in range(5)) / 5 < 0.65 * losses[1]


def test_the_documented_make_variables_are_the_script_s() -> None:
    page, makefile = (ROOT / "docs" / "install.md").read_text(), (ROOT / "Makefile").read_text()
    for name in ("DEVICE", "SMALL", "SHARE_GPU", "SHARD", "MOE", "LONG"):
        assert re.search(rf"^\| `{name}` \|", page, re.M) and re.search(rf"^export .*\b{name}\b", makefile, re.M)


@pytest.mark.slow
def test_the_script_from_end_to_end(tmp_path: Path) -> None:
    """Four ranks on the CPU, the whole run, on this project's own text where the corpus would be."""
    text = tmp_path / "text.txt"
    text.write_text("\n\n\n".join(path.read_text() for path in sorted((ROOT / "megatron_port").rglob("*.py"))))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}", "DEVICE": "cpu", "SMALL": "1"}
    prepared = [sys.executable, "-m", "megatron_port", "data", "prepare", "data/quickstart", "--input", str(text),
                "--tokenizer", "byte", "--blank-lines", "2"]
    subprocess.run(prepared, cwd=tmp_path, env=environment, check=True, timeout=120)
    code = "import quickstart, pathlib, sys; sys.exit(quickstart.main(pathlib.Path.cwd()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True,
                          check=False, timeout=590)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "trained on" in done.stdout and "the CPU: 4 ranks" in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "runs/quickstart/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 150 and max(losses) == losses[0]
    assert (tmp_path / "runs/quickstart/loss.svg").stat().st_size > 10_000


def test_the_other_layout_is_the_same_run_on_one_process() -> None:
    for small in (False, True):
        choice = plan.choose("cpu", 0, small=small)
        one, other = (load(choice.run, sets).config for sets in
                      (choice.overrides, plan.other_layout(choice, choice.overrides, "x")))
        assert config_hash(replace(one, training=other.training)) == config_hash(other)
        assert not problems(other, world_size=1)
        assert (other.name, other.training.steps) == ("x", plan.COMPARED) and other.training.eval_batches == 0
    for other_run in (plan.choose("cpu", 0, moe=True), plan.choose("cuda", 1)):
        assert plan.other_layout(other_run, other_run.overrides, "x") == ()


def test_losses_of_two_layouts_are_compared_step_by_step() -> None:
    one = {1: 5.0, 2: 4.0, 3: 3.0}
    line, wrong = plan.compare_losses(one, {1: 5.0 + 2e-5, 2: 4.0 - 3e-5})
    assert not wrong and line == "the loss of each of 2 steps equal within 7.5e-06, relative (bound 1e-05)"
    assert plan.compare_losses(one, {1: 5.0 + 1e-4})[1] == ["the losses of the two layouts differ by 2.0e-05 at step 1"]
    assert plan.compare_losses(one, {1: 5.0, 2: 4.001})[1] == [
        "the losses of the two layouts differ by 2.5e-04 at step 2"]
    assert plan.compare_losses(one, {1: 5.0, 2: float("nan")})[1]
    assert plan.compare_losses(one, {7: 5.0})[1]
