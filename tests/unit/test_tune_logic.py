"""The tuner without training: what may be chosen, strategies, the results file, how a trial is started and read."""

from __future__ import annotations

import json
import math
import os
import stat
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_port.cli.main import main
from megatron_port.core.config.checks import problems
from megatron_port.core.config.layout import with_values
from megatron_port.core.config.loader import load
from megatron_port.core.errors import ConfigError, EnvironmentFault
from megatron_port.run.processes import born
from megatron_port.tools.plan.search import Candidate
from megatron_port.tools.tune.strategies import (
    FAILED,
    OK,
    OUT_OF_MEMORY,
    PARAMETERS,
    TIMEOUT,
    AtRandom,
    ByModel,
    Results,
    Space,
    Trial,
    best_legal,
    importance,
    importance_line,
    key_of,
    make_space,
    make_strategy,
    parameters,
)
from megatron_port.tools.tune.tuner import (
    Launcher,
    choose_launcher,
    claim,
    hold_folder,
    label_of,
    merged,
    rank_correlation,
    render,
    repeat_near_best,
    run_trial,
    trial_overrides,
    tune,
    write_winner,
)

ROOT = Path(__file__).resolve().parents[2]
RUN = "runs/frontier-22b"


@pytest.fixture(scope="module")
def space() -> Space:
    return make_space(load(RUN).config)


def trial(space: Space, candidate: Candidate, *, status: str = OK, seconds: float | None = 1.0) -> Trial:
    settings = space.settings(candidate)
    return Trial(
        key=key_of(settings, candidate.case.world), world=candidate.case.world, parameters=parameters(candidate.case),
        settings=settings, planned_seconds=candidate.step.seconds, planned_bytes=candidate.memory.total, status=status,
        seconds=seconds, model_tflops=None if seconds is None else 100 / seconds, error="" if seconds else "why",
    )


def test_the_space_holds_the_run_itself_and_only_what_training_takes(space: Space) -> None:
    assert len({c.case for c in space.candidates}) == len(space.candidates) > 50
    assert any((c.case.tp, c.case.pp, c.case.dp, c.case.recompute) == (1, 8, 2, "full") for c in space.candidates)
    best = best_legal(space, 10)
    assert [c.step.model_tflops for c in best] == sorted((c.step.model_tflops for c in best), reverse=True)
    for c in best:
        assert c.fits(space.machine) and problems(with_values(space.config, space.settings(c)), world_size=16) == []
        assert c.case.world == 16 and c.case.global_batch == load(RUN).config.batch.global_batch_size


def test_nodes_and_processes_are_free_of_the_runs_own_layout() -> None:
    config = load("runs/frontier-175b").config
    several = make_space(config, nodes=[16, 32])
    assert {c.case.world for c in several.candidates} == {128, 256}
    assert several.settings(several.fitting[0])["cluster.nodes"] == several.fitting[0].case.world // 8
    local = make_space(config, world_size=6)
    assert {c.case.world for c in local.candidates} == {6} and not local.fitting
    assert all(local.settings(c)["cluster.nodes"] == 0 for c in local.candidates)
    for wrong, words in (({"nodes": [0]}, "at least 1"), ({"world_size": 2, "nodes": [2]}, "--nodes out"),
                         ({"world_size": 0}, "--nproc 0")):
        with pytest.raises(ConfigError, match=words):
            make_space(config, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="how many devices"):
        make_space(load("models/gpt-tiny", ["data.synthetic=true"]).config)


def test_engines_bring_their_own_choices() -> None:
    few = ["cluster.nodes=1", "batch.global_batch_size=16", "layout.pipeline_parallel_size=1"]
    native = make_space(load(RUN, ["engine=native", "layout.zero_stage=0", *few]).config)
    assert {c.case.schedule for c in native.candidates} >= {"1f1b", "gpipe"}
    assert {c.case.schedule for c in make_space(load(RUN, few).config).candidates} == {"1f1b"}


def test_parameters_find_their_layout(space: Space) -> None:
    for c in space.candidates[::17]:
        assert space.find(parameters(c.case)) == c
    assert space.find({**parameters(space.candidates[0].case), "tp": 7}) is None


def test_strategies_ask_each_layout_once(space: Space) -> None:
    by_model = ByModel(space, 4)
    asked = [by_model.ask() for _ in range(5)]
    assert asked[4] is None and len({c.case for c in asked if c}) == 4
    one, two = (AtRandom(space, 3) for _ in range(2))
    first = [one.ask() for _ in range(6)]
    assert [c.case for c in first if c] == [c.case for c in (two.ask() for _ in range(6)) if c]
    assert len({c.case for c in first if c}) == 6 and [c.case for c in first if c] != [c.case for c in asked if c][:6]


def test_a_tuning_goes_on_where_it_was(space: Space, tmp_path: Path) -> None:
    config, said = load(RUN).config, []
    tried: list[str] = []

    def measure(candidate: Candidate, settings: dict[str, Any]) -> Trial:
        if len(tried) == 2:
            raise KeyboardInterrupt
        tried.append(candidate.case.label())
        bad = len(tried) == 1
        return trial(space, candidate, status=OUT_OF_MEMORY if bad else OK, seconds=None if bad else 2.0)

    results = Results.open(tmp_path, config, 5)
    with pytest.raises(KeyboardInterrupt):
        tune(space, ByModel(space, 4), results, measure, count=4, say=said.append)
    again = Results.open(tmp_path, config, 5)
    assert [t.status for t in again.trials.values()] == [OUT_OF_MEMORY, OK]
    after: list[str] = []
    found = tune(space, ByModel(space, 4), again, lambda c, s: (after.append(c.case.label()), trial(space, c))[1],
                 count=4, say=said.append)
    assert found.measured == 2 and len(set(tried + after)) == 4
    assert found.best is not None and found.best.seconds == 1.0
    text = render(again)
    assert "oom: 16 devices" in text and "why" in text and "Spearman" in text


def test_importance_is_what_each_choice_explains_by_itself() -> None:
    """By hand: 32 of 34 are between the values of tp, what micro-batches differ by is chance; a failure counts as 0."""
    rows: list[tuple[dict[str, Any], float]] = [
        ({"tp": tp, "micro_batch": m, "zero_stage": 1, "trial": 10 * tp + m}, rate + m % 2)
        for tp, rate in ((1, 8.0), (2, 4.0)) for m in (1, 2, 3, 4)
    ]
    found = importance(rows)
    between, total = 8 * 2.0**2, 8 * 2.0**2 + 8 * 0.5**2
    noise = (total - between) / 6
    assert list(found) == ["tp", "micro_batch"] and found["micro_batch"] == 0.0  # out: one value, one for each trial
    assert found["tp"] == pytest.approx((between - noise) / (total + noise))
    failed = [(p, 0.0 if p["micro_batch"] == 4 else rate) for p, rate in rows]
    assert importance(failed)["micro_batch"] > importance(failed)["tp"]
    assert importance(rows[:7]) == {} and importance([(p, 1.0) for p, _ in rows]) == {}
    assert "8 trials, failures as 0): tp 92%, micro batch 0%" in importance_line(rows)


def test_results_are_not_mixed_and_never_half_written(space: Space, tmp_path: Path) -> None:
    config = load(RUN).config
    results = Results.open(tmp_path, config, 5)
    for c in space.fitting[:3]:
        results.add(trial(space, c))
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert len(lines) == 4 and json.loads(lines[0])["format"] == 1
    (tmp_path / "results.jsonl").write_text("\n".join(lines) + '\n{"torn')
    same = Results.open(tmp_path, with_values(config, {"activations.policy": "none", "batch.micro_batch_size": 4}), 5)
    assert len(same.trials) == 3
    for other, steps in ((with_values(config, {"batch.global_batch_size": 1280}), 5), (config, 6)):
        with pytest.raises(ConfigError, match="cannot be compared"):
            Results.open(tmp_path, other, steps)
    assert not Results.open(tmp_path, config, 6, fresh=True).trials


def script(path: Path, body: str) -> str:
    """A stand-in for the interpreter: ``OUT`` is the trial's folder."""
    path.write_text(
        f"#!{sys.executable}\nimport json, os, sys, time\n"
        "sets = dict(a.split('=', 1) for a in sys.argv if '=' in a)\n"
        "out = os.path.join(json.loads(sets['output_dir']), json.loads(sets['name']))\n"
        "os.makedirs(out, exist_ok=True)\n"
        f"{body}\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


WORKS = """
with open(os.path.join(out, "metrics.jsonl"), "w") as f:
    for step in range(1, int(sets["training.steps"]) + 1):
        row = {"step": step, "loss": 1.0, "seconds": 9.0 if step < 3 else 2.0, "memory_bytes": 5}
        f.write(json.dumps(row) + chr(10))
"""


@pytest.mark.parametrize(("body", "status", "words"), [
    (WORKS, OK, ""),
    ("print('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate'); sys.exit(1)", OUT_OF_MEMORY, "exit 1"),
    ("os.kill(os.getpid(), 9)", OUT_OF_MEMORY, "exit -9"),
    ("print('error: this run cannot fit: stage 0'); sys.exit(2)", OUT_OF_MEMORY, "cannot fit"),
    ("print('chatter'); print('error: no such corpus'); print('more'); sys.exit(4)", FAILED, "no such corpus"),
    ("time.sleep(60)", TIMEOUT, "no end within"),
    ("pass", FAILED, "no step after the first 2"),
])
def test_what_a_trial_becomes(space: Space, tmp_path: Path, body: str, status: str, words: str) -> None:
    candidate = space.fitting[0]
    found = run_trial(
        RUN, [], space.config, candidate, space.settings(candidate), steps=5, warm_up=2,
        launcher=Launcher(nproc=16, python=script(tmp_path / "python", body)), folder=tmp_path / "trials",
        timeout_s=0.5 if status == TIMEOUT else 30,
    )
    assert found.status == status and words in found.error, found
    if status == OK:
        assert found.seconds == 2.0 and found.spread == 0.0 and found.memory_bytes == 5
        assert found.model_tflops == pytest.approx(candidate.step.model_tflops * candidate.step.seconds / 2.0)
    else:
        assert found.seconds is None and found.model_tflops is None


def test_an_interrupted_trial_is_not_kept(space: Space, tmp_path: Path) -> None:
    python = script(tmp_path / "python", "sys.exit(130)")
    with pytest.raises(KeyboardInterrupt):
        run_trial(RUN, [], space.config, space.fitting[0], space.settings(space.fitting[0]), steps=5, warm_up=2,
                  launcher=Launcher(nproc=16, python=python), folder=tmp_path, timeout_s=30)


def test_a_trial_is_the_run_but_short_and_leaves_nothing(space: Space, tmp_path: Path) -> None:
    ramped = load(RUN, ["batch.rampup_start=64", "batch.rampup_increment=64", "batch.rampup_samples=1000",
                        "optimizer.warmup_steps=9", "checkpoint.save_interval=1", "training.eval_batches=3"])
    texts = trial_overrides(ramped.config, space.settings(space.fitting[0]), steps=4, folder=tmp_path, name="x")
    config = load(RUN, texts).config
    assert problems(config) == [] and config.training.steps == 4 and not config.checkpoint.save_final
    assert config.optimizer.decay_steps == ramped.config.training.steps and config.output_dir == str(tmp_path)
    assert config.layout.tensor_parallel_size == space.fitting[0].case.tp


def test_how_ranks_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load("runs/frontier-175b").config
    local = Launcher(nproc=4, python="py").command(config, ["run.toml"], 4)
    assert local == ["py", "-m", "megatron_port", "train", "run.toml", "--nproc", "4"]
    words = Launcher(python="py").command(config, ["run.toml"], 128)
    assert words[0] == "srun" and "--nodes=16" in words and "--ntasks=128" in words and "--ntasks-per-node=8" in words
    assert "--gpu-bind=closest" in words and "--cpus-per-task=7" in words and "--nproc" not in words
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ConfigError, match="no SLURM allocation"):
        choose_launcher(None)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert choose_launcher(None).nproc == 0 and choose_launcher(3).nproc == 3


def test_the_winner_is_a_run_file(space: Space, tmp_path: Path) -> None:
    loaded = load(RUN, ["training.steps=7"])
    best = trial(space, next(c for c in space.fitting if c.case.tp == 4))
    config = write_winner(loaded, best, tmp_path / "winner.toml")
    assert config.training.steps == 7 and config.layout.tensor_parallel_size == 4 and problems(config) == []
    assert replace(config, training=loaded.config.training) == config
    assert "tp 4" in label_of(best)
    kept = dict(best.settings)
    assert {k: getattr(config.layout, k.partition(".")[2]) for k in kept if k.startswith("layout.")} == {
        k: v for k, v in kept.items() if k.startswith("layout.")
    }


def test_correlation_of_ranks() -> None:
    assert rank_correlation([(1, 10), (2, 20), (3, 30)]) == 1.0 and rank_correlation([(1, 3), (2, 2), (3, 1)]) == -1.0
    assert rank_correlation([(1, 1), (2, 2)]) is None and rank_correlation([(1, 5), (2, 5), (3, 5)]) is None


def test_deephyper_that_is_not_there_is_named_with_what_to_install(
    space: Space, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deephyper", None)
    monkeypatch.setitem(sys.modules, "deephyper.hpo", None)
    with pytest.raises(EnvironmentFault, match="pip install"):
        make_strategy("deephyper", space, count=3, seed=0, folder=str(tmp_path))


def test_deephyper_is_told_failures_and_never_costs_a_trial_for_what_the_planner_knows(
    space: Space, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in of its interface; tests/e2e/test_tune_cli.py runs the real one where it is installed."""
    told: list[tuple[dict[str, Any], Any]] = []

    class Problem:
        def __init__(self) -> None:
            self.values: dict[str, list[Any]] = {}

        def add_hyperparameter(self, values: list[Any], name: str) -> None:
            self.values[name] = values

    class Search:
        def __init__(self, problem: Problem, **options: Any) -> None:
            self.problem, self.count = problem, 0
            self.first = options["initial_points"]
            assert options["acq_func"] == "UCB" and options["acq_optimizer"] == "sampling"
            np.random.RandomState(options["random_state"])  # which it makes of it

        def ask(self, n: int) -> list[dict[str, Any]]:
            self.count += 1
            if self.count == 1:
                return self.first
            return [{k: v[(self.count * (i + 3)) % len(v)] for i, (k, v) in enumerate(self.problem.values.items())}]

        def tell(self, results: list[tuple[dict[str, Any], Any]]) -> None:
            told.extend(results)

    module = types.ModuleType("deephyper.hpo")
    module.CBO, module.HpProblem = Search, Problem  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deephyper", types.ModuleType("deephyper"))
    monkeypatch.setitem(sys.modules, "deephyper.hpo", module)
    strategy = make_strategy("deephyper", space, count=3, seed=2**32 + 7, folder=str(tmp_path))
    asked = []
    while (candidate := strategy.ask()) is not None and len(asked) < 4:
        asked.append(candidate)
        strategy.tell(candidate, trial(space, candidate, status=FAILED if len(asked) == 2 else OK,
                                       seconds=None if len(asked) == 2 else 1.5))
    assert asked[0].case == best_legal(space, 1)[0].case
    assert all(c.fits(space.machine) and space.legal(c) for c in asked) and len({c.case for c in asked}) == len(asked)
    answers = [answer for _, answer in told]
    assert 100 / 1.5 in answers and "F_failed" in answers and ("F_illegal" in answers or "F_memory" in answers)
    assert set(told[0][0]) < set(PARAMETERS)


def test_the_command_refuses_and_ranks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for arguments, words in (
        (["--trials", "0"], "--trials 0"), (["--steps", "2"], "leaves nothing to measure"),
        (["--timeout", "0"], "--timeout 0"), ([], "no SLURM allocation"),
        (["--nproc", "1"], "no layout on 1 devices fits"),
    ):
        assert main(["tune", RUN, *arguments]) == 2
        assert words in capsys.readouterr().err
    assert main(["tune", RUN, "--plan-only", "--trials", "3"]) == 0
    out = capsys.readouterr().out
    assert "legal layouts on 16 devices planned" in out and out.count("model TFLOP/s") == 3
    assert not os.path.exists("runs/frontier-22b-tune")


def times(*seconds: float) -> Iterator[float]:
    yield from seconds


def test_layouts_near_the_best_start_again_until_they_are_apart(space: Space, tmp_path: Path) -> None:
    """The first starts of two are within their steps' spread, the second ones are apart; what is behind starts once."""
    first, second, third = space.fitting[:3]
    starts = {c.case: times(*seconds) for c, seconds in (
        (first, (1.95, 1.91, 0.0)), (second, (1.97, 2.05, 0.0)), (third, (3.0,)),
    )}

    def measure(candidate: Candidate, settings: dict[str, Any]) -> Trial:
        return replace(trial(space, candidate, seconds=next(starts[candidate.case])), spread=0.02)

    results = Results.open(tmp_path, load(RUN).config, 5)
    said: list[str] = []
    strategy = ByModel(space, 0)
    strategy.left = [first, second, third]
    found = tune(space, strategy, results, measure, count=3, say=said.append, repeats=3)
    assert found.best is not None and found.best.parameters == parameters(first.case)
    assert found.best.seconds == pytest.approx(1.93) and found.best.runs == (1.95, 1.91)
    assert not found.decision.near and found.decision.words.startswith("decided")
    assert next(starts[third.case], None) is None and "2 starts, 1.91 to 1.95 s" in render(results)
    same = Results.open(tmp_path, load(RUN).config, 5)
    assert {len(t.starts) for t in same.trials.values()} == {1, 2}
    once = tune(space, ByModel(space, 0), same, measure, count=3, say=said.append, repeats=3)  # nothing is left to do
    assert once.best is not None and once.best.key == found.best.key and once.measured == 0


def test_what_its_spread_does_not_tell_apart_is_not_called_decided(space: Space, tmp_path: Path) -> None:
    results = Results.open(tmp_path, load(RUN).config, 5)
    first, second = (replace(trial(space, c, seconds=2.0), spread=0.1) for c in space.fitting[:2])
    for one in (first, second):
        results.add(one)
    decision = repeat_near_best(results, lambda t: replace(t, seconds=2.01), repeats=2, say=lambda line: None)
    assert len(decision.near) == 1 and decision.words.startswith("not decided: 1 other layout within")
    failed = merged(first, replace(first, status=FAILED, seconds=None, model_tflops=None, error="exit 1"))
    assert failed.status == FAILED and "worked 1 times, then: exit 1" in failed.error


def test_a_killed_tunings_trial_is_ended_and_not_run_beside(tmp_path: Path) -> None:
    """Its leader has gone already: what it started is in its session still."""
    orphan = subprocess.Popen(["sh", "-c", "sleep 300 & echo $!; sleep 300"], stdout=subprocess.PIPE, text=True,
                              start_new_session=True)
    assert orphan.stdout is not None
    rank = int(orphan.stdout.readline())
    with hold_folder(tmp_path, print) as note:
        note(orphan.pid)
        known = json.loads((tmp_path / "running.json").read_text())
        with pytest.raises(EnvironmentFault, match="tunes in"):
            other = {**known, "tune": [os.getppid(), born(os.getppid())]}
            (tmp_path / "running.json").write_text(json.dumps(other))
            claim(tmp_path)
    assert not (tmp_path / "running.json").exists() and born(rank)
    (tmp_path / "running.json").write_text(json.dumps({**known, "tune": [os.getpid(), 1]}))
    orphan.kill()
    orphan.wait()
    said: list[str] = []
    with hold_folder(tmp_path, said.append):
        assert not born(rank) and said == ["ended the trial that a killed tuning had left running (2 processes)"]
    (tmp_path / "running.json").write_text(json.dumps({**known, "space": "elsewhere"}))
    with pytest.raises(EnvironmentFault, match="another machine"):
        claim(tmp_path)
    (tmp_path / "running.json").write_text(json.dumps({**known, "space": "elsewhere", "job": "an earlier one"}))
    assert claim(tmp_path) == ""


def test_the_strategies_beat_random_at_equal_trials_on_three_problems() -> None:
    """By the record (benchmarks/tune_strategies.py); the statistic is computed again from what was found."""
    record = json.loads((ROOT / "benchmarks" / "results" / "tune-strategies.json").read_text())
    assert record["trials"] == 8 and record["machines"] >= 16 and len(record["problems"]) == 3
    assert record["strategies"] == ["random", "model", "deephyper"]
    for rows in record["problems"].values():
        for name in ("model", "deephyper"):
            pairs = list(zip(rows["found"][name], rows["found"]["random"]))
            better, worse = sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)
            odds = sum(math.comb(better + worse, k) for k in range(better, better + worse + 1)) / 2 ** (better + worse)
            assert len(pairs) == record["machines"] and odds < 0.05, (name, better, worse)


def test_deephyper_itself_chooses_layouts_that_fit(space: Space, tmp_path: Path) -> None:
    pytest.importorskip("deephyper", reason="DeepHyper is not installed (extra: tune)")
    strategy = make_strategy("deephyper", space, count=4, seed=0, folder=str(tmp_path))
    asked = []
    for number in range(4):
        candidate = strategy.ask()
        assert candidate is not None and candidate.fits(space.machine) and space.legal(candidate)
        asked.append(candidate)
        bad = number == 1
        strategy.tell(candidate, trial(space, candidate, status=FAILED if bad else OK, seconds=None if bad else 2.0))
    assert asked[0].case == best_legal(space, 1)[0].case and len({c.case for c in asked}) == 4
