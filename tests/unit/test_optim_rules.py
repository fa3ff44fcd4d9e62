"""Optimizer state by rule and parameter, buffers, and checkpoints that hold several kinds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contexts import slice_record

from megatron_port.backend.providers import torch_providers
from megatron_port.checkpoint.format import kinds_fault, read_manifest
from megatron_port.checkpoint.reader import Checkpoint, open_checkpoint
from megatron_port.checkpoint.writer import save_checkpoint
from megatron_port.config.schema import BatchConfig, ModelConfig, OptimizerConfig, PrecisionConfig, RunConfig
from megatron_port.data.batch import MicroBatch
from megatron_port.engine.native import NativeEngine
from megatron_port.errors import CheckpointError, ConfigError, DamagedCheckpoint
from megatron_port.interop.commit import commit_import
from megatron_port.interop.export_dcp import export_dcp
from megatron_port.interop.export_universal import export_universal
from megatron_port.interop.import_dcp import read_dcp
from megatron_port.interop.staged import Stage
from megatron_port.model import layers
from megatron_port.model.build import BuildContext
from megatron_port.model.saved_state import state_records
from megatron_port.optim.rules import ElementwiseRule, UpdateSettings
from megatron_port.parallel.buffers import add_buffer, recorded_buffers
from megatron_port.parallel.context import ParallelContext
from megatron_port.parallel.record import InitSpec, ParameterRecord
from megatron_port.parallel.state import StatePiece
from megatron_port.registry import OPTIMIZERS
from megatron_port.session.assemble import build_engine
from megatron_port.session.changes import check_rule
from megatron_port.train.state import Position, check_resumable, shapes_of, state_of

MODEL = ModelConfig(num_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=19, seq_length=8)


class MatrixMomentum(ElementwiseRule):
    """Momentum for what decays, sign descent without any state for the rest."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        """Number of each update so far, once a piece."""

    def kinds(self, record: ParameterRecord) -> tuple[str, ...]:
        return ("velocity",) if record.decay else ()

    def update_(
        self, master: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], settings: UpdateSettings
    ) -> None:
        assert bool(settings.weight_decay) == bool(state)  # what decays has state
        self.seen.append(settings.step)
        if not state:
            master.sub_(gradient.sign(), alpha=settings.lr)
            return
        velocity = state["velocity"].mul_(settings.beta1).add_(gradient)
        master.mul_(1 - settings.lr * settings.weight_decay).sub_(velocity, alpha=settings.lr)


@pytest.fixture
def mixed(monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A run whose parameters have different state, and whose layers have a buffer each."""
    monkeypatch.setitem(OPTIMIZERS._added, "mixed", MatrixMomentum())
    real = layers.TransformerLayer.__init__

    def with_buffer(self: Any, number: int, *more: Any) -> None:
        real(self, number, *more)
        (build,) = (value for value in more if isinstance(value, BuildContext))
        record = slice_record(f"layers.{number}.balance", (3,), init=InitSpec("ones"), decay=False)
        add_buffer(self, "balance", record, build.ctx.device)

    monkeypatch.setattr(layers.TransformerLayer, "__init__", with_buffer)
    return RunConfig(
        engine="native", seed=5, model=MODEL, batch=BatchConfig(global_batch_size=2),
        optimizer=OptimizerConfig(name="mixed", lr=0.1, weight_decay=0.3), precision=PrecisionConfig(dtype="bf16"),
    )


def engine_of(config: RunConfig) -> NativeEngine:
    engine = build_engine(config, ParallelContext.single(), torch_providers())
    assert isinstance(engine, NativeEngine)
    return engine


def train(engine: NativeEngine, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        both = torch.from_numpy((np.arange(18).reshape(2, 9) * (step + 3)) % 19)
        batch = MicroBatch((2 * step, 2 * step + 1), tokens=both[:, :-1], labels=both[:, 1:])
        engine.train_step([batch], step=step, lr=0.01)
        for _, buffer in engine.buffers:
            buffer.add_(0.1)


def state(engine: NativeEngine) -> dict[tuple[str, str, int], torch.Tensor]:
    return {(p.name, p.kind, p.flat_start): p.tensor.clone() for p in engine.state_pieces()}


def save(engine: NativeEngine, config: RunConfig, folder: Path, step: int) -> Path:
    records = state_records(config.model)
    saved = state_of(engine, config, Position(step=step, samples=2 * step, skipped=0), records)
    return save_checkpoint(folder, saved, engine.state_pieces(), expected=shapes_of(records))


def resumed(config: RunConfig, checkpoint: Checkpoint) -> NativeEngine:
    check_resumable(checkpoint, config)
    engine = engine_of(config)
    engine.load_state(checkpoint.read, dict(checkpoint.scalars))
    return engine


def test_mixed_kinds_and_buffers_resume_to_the_bit(mixed: RunConfig, tmp_path: Path) -> None:
    whole, first = engine_of(mixed), engine_of(mixed)
    assert {b.dtype for _, b in first.buffers} == {torch.float32}  # in a bf16 run
    assert all(torch.equal(b, torch.ones(3)) for _, b in first.buffers)
    train(whole, 0, 5)
    train(first, 0, 3)
    path = save(first, mixed, tmp_path, 3)
    checkpoint = open_checkpoint(path)
    assert checkpoint.kinds() == ("buffer", "velocity", "weight")
    assert set(checkpoint.names("buffer")) == {"layers.0.balance", "layers.1.balance"}
    assert set(checkpoint.names("velocity")) == {r.name for r, _ in first.parameters if r.decay}
    assert torch.allclose(checkpoint.read("layers.1.balance", "buffer", (0,), (3,)), torch.full((3,), 1.3))
    again = resumed(mixed, checkpoint)
    assert again.update.steps == 3
    rule = again.sharded.rule
    assert isinstance(rule, MatrixMomentum)
    assert sorted(set(rule.seen)) == [1, 2, 3, 4, 5]
    rule.seen.clear()
    train(again, 3, 2)
    assert sorted(set(rule.seen)) == [4, 5]
    want, found = state(whole), state(again)
    assert want.keys() == found.keys() and all(torch.equal(want[key], found[key]) for key in want)
    moved = [key for key, tensor in state(first).items() if not torch.equal(tensor, want[key])]
    assert {kind for _, kind, _ in moved} == {"weight", "velocity", "buffer"}  # the steps between changed all of them


@pytest.mark.parametrize(("name", "kind"), [
    ("layers.0.attention.qkv.weight", "velocity"), ("layers.1.balance", "buffer"), ("final_norm.weight", "weight"),
])
def test_a_tensor_that_is_not_there_is_named(mixed: RunConfig, tmp_path: Path, name: str, kind: str) -> None:
    engine, records = engine_of(mixed), state_records(mixed.model)
    train(engine, 0, 1)
    saved = state_of(engine, mixed, Position(step=1, samples=2, skipped=0), records)
    pieces = [p for p in engine.state_pieces() if (p.name, p.kind) != (name, kind)]
    with pytest.raises(CheckpointError, match=f"{name} lacks {kind}"):
        save_checkpoint(tmp_path, saved, pieces, expected=shapes_of(records))
    extra = StatePiece("final_norm.weight", "velocity", (16,), (0,), (16,), 0, torch.zeros(16))
    with pytest.raises(CheckpointError, match="final_norm.weight has, and should not, velocity"):
        save_checkpoint(tmp_path, saved, [*engine.state_pieces(), extra], expected=shapes_of(records))
    # A writer that declares less than the rule keeps: found before anything is loaded.
    fewer = {n: [k for k in kinds if (n, k) != (name, kind)] for n, kinds in saved.kinds.items()}
    if all(fewer.values()):
        path = save_checkpoint(tmp_path, replace(saved, kinds=fewer), pieces)
        with pytest.raises(DamagedCheckpoint, match=f"no weight of {name}|step 1 and has no {kind} of {name}"):
            check_resumable(open_checkpoint(path), mixed)


def test_one_set_of_kinds_leaves_the_manifest_as_it_was(tmp_path: Path) -> None:
    config = RunConfig(engine="native", seed=5, model=MODEL, batch=BatchConfig(global_batch_size=2))
    engine = engine_of(config)
    train(engine, 0, 1)
    path = save(engine, config, tmp_path, 1)
    assert '"kinds"' not in (path / "manifest.json").read_text() and read_manifest(path).state.kinds == {}
    assert open_checkpoint(path).kinds() == ("exp_avg", "exp_avg_sq", "weight")
    assert kinds_fault(read_manifest(path).pieces[1:], {}) is not None


def test_another_rule_does_not_continue(mixed: RunConfig, tmp_path: Path) -> None:
    engine = engine_of(mixed)
    train(engine, 0, 1)
    manifest = read_manifest(save(engine, mixed, tmp_path, 1))
    check_rule(manifest, mixed, "there")
    other = replace(mixed, optimizer=OptimizerConfig())
    with pytest.raises(ConfigError, match='optimizer.name "mixed" -> "adamw": there holds the state of "mixed"'):
        check_rule(manifest, other, "there")


def test_exports_keep_what_the_rule_keeps(mixed: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # without buffers, which no other format has
    monkeypatch.setitem(OPTIMIZERS._added, "mixed", MatrixMomentum())
    engine = engine_of(mixed)
    train(engine, 0, 2)
    checkpoint = open_checkpoint(save(engine, mixed, tmp_path, 2))
    with pytest.raises(CheckpointError, match="no exp_avg or exp_avg_sq"):
        export_universal(checkpoint, tmp_path / "universal")
    out = export_dcp(checkpoint, tmp_path / "dcp")
    (tmp_path / "staged").mkdir()
    found = read_dcp(out, Stage(tmp_path / "staged"))
    back = open_checkpoint(commit_import(found, tmp_path / "back", source=out))
    assert back.kinds() == checkpoint.kinds() == ("velocity", "weight") and back.step == 2
    for kind in back.kinds():
        for name in back.names(kind):
            shape = back.shape(name, kind)
            box = ((0,) * len(shape), shape)
            assert torch.equal(back.read(name, kind, *box), checkpoint.read(name, kind, *box)), (name, kind)
    monkeypatch.delitem(OPTIMIZERS._added, "mixed")
    with pytest.raises(CheckpointError, match="'mixed' is unknown"):
        read_dcp(out, Stage(tmp_path / "staged"))


def test_a_cast_buffer_is_noticed() -> None:
    module = torch.nn.Module()
    add_buffer(module, "bias", slice_record("bias", (2,), init=InitSpec("zeros"), decay=False), torch.device("cpu"))
    ((record, _),) = recorded_buffers(module)
    assert record.kind == "buffer"
    with pytest.raises(ValueError, match="buffer bias is bfloat16"):
        recorded_buffers(module.to(torch.bfloat16))


def test_kinds_of_a_manifest_are_checked(mixed: RunConfig, tmp_path: Path) -> None:
    engine = engine_of(mixed)
    path = save(engine, mixed, tmp_path, 0)
    body = json.loads((path / "manifest.json").read_text())
    text = json.dumps(body)
    assert "velocity" in text
    from megatron_port.checkpoint.schema import field_fault

    inner = body.get("manifest", body)
    assert field_fault(inner, 2) is None
    assert "kinds.x is 7" in str(field_fault({**inner, "kinds": {"x": 7}}, 2))
