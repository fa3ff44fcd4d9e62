"""What a run is told, or refused, when it resumes with other settings or in another run's folder; and its report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_checkpoint_roundtrip import whole

from megatron_port.core.checkpoint.format import Manifest, SavedState, read_manifest
from megatron_port.core.checkpoint.writer import Committer, save_checkpoint
from megatron_port.core.config.checks import resolve
from megatron_port.core.config.schema import (
    BatchConfig,
    CheckpointConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    TrainingConfig,
)
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.rank import Fence
from megatron_port.core.errors import CheckpointError, ConfigError
from megatron_port.core.optim.schedules import BatchSchedule
from megatron_port.core.train.folders import FOLDER, run_folder
from megatron_port.ext.telemetry.metrics import MetricsWriter
from megatron_port.run.changes import changes_since, check_batch, check_seed, ended_rampup
from megatron_port.run.hooks import finished_line
from megatron_port.run.provenance import own_checkpoints, read_identity, record_event, record_failure_event, settle
from megatron_port.run.state import Position, find_checkpoints, state_of
from megatron_port.tools.report.run_data import read_run

BASE = RunConfig(
    name="run", model=ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=11, seq_length=4),
    batch=BatchConfig(global_batch_size=8), optimizer=OptimizerConfig(lr=1e-3), training=TrainingConfig(steps=150),
)


def saved(config: RunConfig, step: int, samples: int | None = None) -> Manifest:
    """The manifest of a checkpoint of a run of one process."""
    config = resolve(config, 1)
    engine: Any = SimpleNamespace(scalar_state=dict)
    count = BatchSchedule(config.batch, 1).samples_before(step) if samples is None else samples
    state: SavedState = state_of(engine, config, Position(step=step, samples=count, skipped=0))
    from megatron_port.core.config.dump import as_dict

    return Manifest(state=replace(state, config=as_dict(config)), saved_at=0.0, versions={}, files={}, pieces=())


def lines(manifest: Manifest, config: RunConfig) -> list[str]:
    return changes_since(manifest, resolve(config, 1), None, "step-00000100")


# ---------------------------------------------------------------- settings


def test_a_changed_batch_is_a_matter_of_configuration_with_the_numbers() -> None:
    other = replace(BASE, batch=BatchConfig(global_batch_size=16))
    with pytest.raises(ConfigError) as caught:
        check_batch(saved(BASE, 100), other, 1, "runs/run/checkpoints/step-00000100")
    text = str(caught.value)
    for said in ("batch.global_batch_size 8 -> 16", "800 samples", "100 steps", "begins at sample 1600",
                 "Put it back (batch.global_batch_size = 8)", "batch.rampup_start = 8, batch.rampup_increment = 8, "
                 "batch.rampup_samples = 800", 'checkpoint.initial_weights = "runs/run/checkpoints/step-00000100"'):
        assert said in text, (said, text)
    smaller = replace(BASE, batch=BatchConfig(global_batch_size=4))
    with pytest.raises(ConfigError, match="begins at sample 400") as caught:
        check_batch(saved(BASE, 100), smaller, 1, "x")
    assert "rampup" not in str(caught.value)
    check_batch(saved(BASE, 100), replace(BASE, batch=BatchConfig(global_batch_size=8, micro_batch_size=4)), 2, "x")


@settings(deadline=None)
@given(old=st.integers(1, 64), new=st.integers(1, 256), step=st.integers(1, 3000))
def test_the_ramp_up_that_is_advised_is_right(old: int, new: int, step: int) -> None:
    """With it every step before the checkpoint has the old batch, and every one from it on the new one."""
    before = replace(BASE, batch=BatchConfig(global_batch_size=old))
    manifest = saved(before, step)
    after = replace(BASE, batch=BatchConfig(global_batch_size=new))
    if old == new:
        return check_batch(manifest, after, 1, "x")
    with pytest.raises(ConfigError) as caught:
        check_batch(manifest, after, 1, "x")
    text = str(caught.value)
    assert ("batch.rampup_start = " in text) == (new > old)
    if new < old:
        return None
    advice = dict(p.split(" = ") for p in text.partition(f"to {new} with ")[2].split(", ")[:3])
    ramped = BatchConfig(global_batch_size=new, **{k.partition(".")[2]: int(v) for k, v in advice.items()})
    check_batch(manifest, replace(BASE, batch=ramped), 1, "x")
    schedule = BatchSchedule(ramped, 1)
    assert schedule.step_plan(step - 1) == (old * (step - 1), old)
    assert schedule.step_plan(step) == (old * step, new) and schedule.step_plan(step + 1)[1] == new
    return None


def test_a_ramp_up_resumes_and_another_one_is_refused() -> None:
    ramp = BatchConfig(global_batch_size=16, rampup_start=4, rampup_increment=4, rampup_samples=100)
    config = replace(BASE, batch=ramp)
    for step in (0, 3, 9, 50):
        check_batch(saved(config, step), config, 1, "x")
    with pytest.raises(ConfigError, match=r"batch\.rampup_samples 100 -> 200.*Put it back \(batch\.rampup_samples = "):
        check_batch(saved(config, 50), replace(BASE, batch=replace(ramp, rampup_samples=200)), 1, "x")


@settings(deadline=None)
@given(stages=st.integers(1, 6), samples=st.integers(1, 500), more=st.integers(0, 300), dp=st.sampled_from([1, 8, 16]))
def test_a_ramp_up_that_has_ended_can_be_left_out(stages: int, samples: int, more: int, dp: int) -> None:
    """More replicas than the ramp-up's batches divide by take the same samples in the same steps, resumed twice."""
    ramp = BatchConfig(global_batch_size=16, micro_batch_size=1, rampup_start=16 - 2 * stages, rampup_increment=2,
                       rampup_samples=samples)
    config, plain = (replace(BASE, batch=b) for b in (ramp, BatchConfig(global_batch_size=16, micro_batch_size=1)))
    whole = BatchSchedule(ramp, 1)
    over = next(step for step in range(1000) if whole.samples_before(step) >= samples)
    if over > 1:
        with pytest.raises(ConfigError, match=f"leave the ramp-up out once it has ended, after {samples} samples"):
            check_batch(saved(config, over - 1), plain, dp, "x")
    manifest = saved(config, over + more)
    for _ in range(2):
        check_batch(manifest, plain, dp, "x")
        begun = ended_rampup(manifest, plain)
        schedule = BatchSchedule(plain.batch, dp, begun)
        for step in (over, over + more, over + more + 7):
            assert schedule.step_plan(step) == whole.step_plan(step)
        state = replace(saved(plain, over + more + 5).state, samples=whole.samples_before(over + more + 5))
        manifest = replace(saved(plain, over + more + 5), state=state)
    other = replace(plain, batch=replace(plain.batch, global_batch_size=32))
    assert ended_rampup(manifest, other) is None


def test_another_seed_is_refused_unless_the_checkpoint_is_named() -> None:
    other = replace(BASE, seed=99)
    with pytest.raises(ConfigError, match="seed 1234 -> 99.*Set seed = 1234"):
        check_seed(saved(BASE, 100), other, "x")
    check_seed(saved(BASE, 100), BASE, "x")
    check_seed(saved(BASE, 100), replace(other, checkpoint=CheckpointConfig(resume="x")), "x")
    manifest = saved(BASE, 100)
    imported = replace(manifest, state=replace(manifest.state, config_hash=""))
    check_seed(imported, other, "x")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"model": replace(BASE.model, hidden_dropout=0.1)}, "model.hidden_dropout 0.0 -> 0.1"),
        ({"model": replace(BASE.model, attention_dropout=0.2)}, "model.attention_dropout 0.0 -> 0.2"),
        ({"model": replace(BASE.model, init_std=0.01)}, "model.init_std 0.02 -> 0.01"),
        ({"optimizer": replace(BASE.optimizer, weight_decay=0.0)}, "optimizer.weight_decay 0.1 -> 0.0"),
        ({"precision": replace(BASE.precision, dtype="fp32")}, "precision.dtype 'bf16' -> 'fp32'"),
        ({"data": replace(BASE.data, train=("x/other",))}, "data.train [] -> ['x/other']"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_changed_is_named(change: dict[str, Any], line: str) -> None:
    said = lines(saved(BASE, 100), replace(BASE, **change))
    assert said == [f"note: other settings than when step-00000100 was saved: {line}", SAME_RATE]


SAME_RATE = "the learning rate continues at 0.00025 (step 100)"


def test_what_does_not_determine_training_has_a_line_of_its_own() -> None:
    same = replace(
        BASE, model=replace(BASE.model, name="x"), batch=replace(BASE.batch, micro_batch_size=2),
        telemetry=replace(BASE.telemetry, tensorboard=True),
    )
    assert lines(saved(BASE, 100), same) == [
        "also changed since step-00000100: model.name 'gpt' -> 'x', batch.micro_batch_size 1 -> 2, "
        "telemetry.tensorboard False -> True", SAME_RATE,
    ]
    assert lines(saved(BASE, 100), replace(BASE, name="another", output_dir="elsewhere")) == [SAME_RATE]
    assert lines(saved(replace(BASE, engine="deepspeed"), 100), replace(BASE, engine=RunConfig().engine)) == [
        "also changed since step-00000100: engine 'deepspeed' -> 'native'", SAME_RATE,
    ]
    near = replace(BASE, data=replace(BASE.data, train=("/fast/c",)))
    assert lines(saved(near, 100), replace(BASE, data=replace(BASE.data, train=("/slow/disk/c",)))) == [SAME_RATE]


def test_a_learning_rate_that_jumps_is_announced_as_that() -> None:
    """``decay_steps 150 -> 300`` was all that was said of a rate that became several times as high."""
    longer = replace(BASE, training=TrainingConfig(steps=300))
    said = lines(saved(BASE, 120), longer)
    # cosine: 1e-3 (1 + cos(pi 120/150)) / 2 and 1e-3 (1 + cos(pi 120/300)) / 2
    assert said == [
        "note: other settings than when step-00000100 was saved: optimizer.decay_steps 150 -> 300",
        "also changed since step-00000100: training.steps 150 -> 300",
        "warning: the learning rate jumps by a factor of 6.85 at step 120: 9.54915e-05 -> 0.000654508",
    ]
    lower = replace(BASE, optimizer=replace(BASE.optimizer, lr=5e-4))
    assert "jumps by a factor of 0.5 at step 10" in lines(saved(BASE, 10), lower)[-1]
    slightly = replace(BASE, optimizer=replace(BASE.optimizer, lr=1.1e-3))
    assert lines(saved(BASE, 10), slightly)[-1].startswith("the learning rate changes at step 10: 0.000989")
    after_the_end = lines(saved(BASE, 150), longer)[-1]
    assert after_the_end == "the learning rate jumps from 0 to 0.0005 at step 150"
    kept = replace(BASE, training=TrainingConfig(steps=300), optimizer=replace(BASE.optimizer, decay_steps=150))
    assert lines(saved(BASE, 150), kept)[-1] == (
        "warning: the learning rate is 0 from step 150 on, so the weights stay as they are: optimizer.decay_steps is "
        "150; try --set optimizer.decay_steps=300"
    )
    assert finished_line(kept, 150, 0).endswith("--set training.steps=300 --set optimizer.decay_steps=300")
    steady = replace(BASE, optimizer=replace(BASE.optimizer, min_lr=1e-4))
    assert finished_line(steady, 150, 0).endswith("to train further: --set training.steps=300")
    manifest = saved(BASE, 120)
    old = replace(manifest, state=replace(manifest.state, schedule={}))  # a version that did not save the rate
    assert lines(old, longer)[-1] == said[-1]


# ---------------------------------------------------------------- whose run it is


def config_in(folder: Path, **changes: Any) -> RunConfig:
    return resolve(replace(BASE, output_dir=str(folder), **changes), 1)


def session_in(config: RunConfig, notes: list[str]) -> Any:
    return SimpleNamespace(
        config=config, cpu_group=None, is_rank_zero=True, info=SimpleNamespace(world_size=1, rank=0), fence=Fence(),
        ctx=ParallelContext.single(), logger=SimpleNamespace(log=notes.append),
        progress=SimpleNamespace(step=0),
    )


def train(config: RunConfig, step: int, notes: list[str] | None = None) -> tuple[str, Path]:
    """An attempt: find, settle, save. Returns the run's id and the checkpoint."""
    session = session_in(config, [] if notes is None else notes)
    found = find_checkpoints(session)
    begun = read_manifest(found[0]) if found else None
    made = settle(run_folder(config), config, begun, session.fence, path=found[0] if found else None)
    engine: Any = SimpleNamespace(scalar_state=dict)
    committer = Committer(session.fence)
    if begun is not None:
        committer.resumed(begun.lineage, begun.state.step)
    state = state_of(engine, config, Position(step=step, samples=8 * step, skipped=0))
    path = save_checkpoint(run_folder(config) / FOLDER, state, [whole("w", torch.ones(4))], committer=committer)
    return made.id, path


def test_a_run_keeps_its_id_over_resumes(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    first, path = train(config, 10)
    again, later = train(replace(config, optimizer=replace(config.optimizer, lr=2e-3)), 20)
    assert len(first) == 16 and again == first
    assert read_manifest(path).lineage.run == read_manifest(later).lineage.run == first
    moved = tmp_path / "moved"
    run_folder(config).rename(moved)
    assert train(replace(config, name="moved"), 30)[0] == first  # the folder was renamed, with all that is in it


@pytest.mark.parametrize("there", [False, True], ids=["new folder", "folder of a run"])
def test_a_checkpoint_of_another_run_is_not_resumed_under_this_name(tmp_path: Path, there: bool) -> None:
    theirs, path = train(config_in(tmp_path, name="theirs"), 10)
    mine = config_in(tmp_path, name="mine")
    home = run_folder(mine) / FOLDER
    home.mkdir(parents=True)
    own = settle(run_folder(mine), mine, None, Fence()).id if there else "none yet"
    path.rename(home / path.name)
    notes: list[str] = []
    with pytest.raises(CheckpointError) as caught:
        find_checkpoints(session_in(mine, notes))
    text = str(caught.value)
    for said in (str(home / path.name), '"theirs"', theirs, own, "checkpoint.resume = ", "checkpoint.initial_weights"):
        assert said in text, (said, text)
    # The documented ways: named, or afresh.
    named = replace(mine, checkpoint=CheckpointConfig(resume=str(home / path.name)))
    assert find_checkpoints(session_in(named, notes)) == [home / path.name]
    run, _ = train(named, 20)
    assert run != theirs
    identity = read_identity(run_folder(mine))
    assert identity is not None and identity.origin == {"run": theirs, "commit": 1, "step": 10}
    # From here on its own are there, and the other's is passed over.
    assert [p.name for p in find_checkpoints(session_in(mine, notes))] == ["step-00000020"]
    assert f"passing over step-00000010: it is of another run (id {theirs}" in notes[-1]


def test_a_fresh_start_is_another_run_and_the_old_records_are_kept_apart(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    first, _ = train(config, 10)
    folder = run_folder(config)
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n')
    never = replace(config, checkpoint=CheckpointConfig(resume="never"))
    second, _ = train(never, 20)
    assert second != first and not (folder / "metrics.jsonl").exists()
    assert read_run(folder / "previous" / first).facts["loss"] == 3.0
    third, _ = train(config, 30)
    assert third == second  # resumes from its own step 20, though step 10 of the first is there too


def test_an_attempt_before_the_first_checkpoint_is_the_same_run_if_its_settings_are(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    folder = run_folder(config)
    first = settle(folder, config, None, Fence())
    assert settle(folder, config, None, Fence()).id == first.id
    other = replace(config, optimizer=replace(config.optimizer, lr=1.0))
    assert settle(folder, other, None, Fence()).id != first.id
    (folder / "run.json").write_text('{"id": 3')
    assert read_identity(folder) is None
    said: list[str] = []
    assert own_checkpoints(folder, config, [], said.append) == []
    (line,) = said
    assert line.startswith("run.json left out: ") and line.endswith("those of the former stay")


def test_checkpoints_of_versions_without_ids_are_the_folders(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    engine: Any = SimpleNamespace(scalar_state=dict)
    state = state_of(engine, config, Position(step=10, samples=80, skipped=0))
    save_checkpoint(run_folder(config) / FOLDER, state, [whole("w", torch.ones(4))])
    run, _ = train(config, 20)
    identity = read_identity(run_folder(config))
    assert identity is not None and identity.id == run and identity.origin is None
    for step in (10, 20):  # named, they are this run's too: it goes back
        at = run_folder(config) / FOLDER / f"step-{step:08d}"
        assert train(replace(config, checkpoint=CheckpointConfig(resume=str(at))), 30)[0] == run


def test_failed_attempts_with_other_settings_are_not_in_the_report(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    wrong = replace(config, model=replace(config.model, hidden_dropout=0.5))
    folder = run_folder(config)
    early = session_in(config, [])
    record_failure_event(session_in(wrong, []), ConfigError("a mistake of another day"))
    record_failure_event(early, ConfigError("a node was not there"))
    settle(folder, config, None, early.fence)
    record_event(early, "start", 0, host="n1")
    writer = MetricsWriter(folder / "metrics.jsonl")
    writer.write({"step": 1, "loss": 1.0, "seconds": 1.0})
    record_failure_event(session_in(wrong, []), CheckpointError("holds another model"))
    record_failure_event(early, CheckpointError("its own end"))
    with open(folder / "events.jsonl", "a") as stream:  # of the watch, and of versions that did not say
        stream.write(json.dumps({"time": 1.0, "event": "straggler", "rank": 3}) + "\n")
        stream.write(json.dumps({"time": 1.0, "event": "start", "run": "another", "step": 0}) + "\n")
    run = read_run(folder)
    told = [e.get("message", e["event"]) for e in run.events]
    assert told == ["ConfigError: a node was not there", "start", "CheckpointError: its own end", "straggler"]
    assert run.facts["step"] == 1
