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

from megatron_port.core.checkpoint.format import kinds_fault, read_manifest
from megatron_port.core.checkpoint.reader import Checkpoint, open_checkpoint
from megatron_port.core.checkpoint.writer import save_checkpoint
from megatron_port.core.config.optimizer import AdagradOptions, SGDOptions
from megatron_port.core.config.schema import (
    BatchConfig,
    CheckpointConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
)
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.collectives import add_buffer, recorded_buffers
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.dist.record import InitSpec, ParameterRecord, Shard, StatePiece
from megatron_port.core.engine.native import NativeEngine
from megatron_port.core.errors import CheckpointError, ConfigError, DamagedCheckpoint
from megatron_port.core.layers.providers import torch_providers
from megatron_port.core.model import layers
from megatron_port.core.model.build import BuildContext
from megatron_port.core.optim.buckets import StateShard, plan_buckets, state_layouts
from megatron_port.core.optim.rules import ALIGN, BlockRule, ElementwiseRule, StateKind, UpdateSettings, rule_of
from megatron_port.core.registry import OPTIMIZERS
from megatron_port.run.build import build_engine, state_records
from megatron_port.run.changes import check_rule, starts_fresh
from megatron_port.run.loading import check_resumable
from megatron_port.run.state import Position, shapes_of, state_of
from megatron_port.tools.interop.dcp import Stage, commit_import, export_dcp, read_dcp
from megatron_port.tools.interop.universal import export_universal

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
    from megatron_port.core.checkpoint.format import field_fault

    inner = body.get("manifest", body)
    assert field_fault(inner, 2) is None
    assert "kinds.x is 7" in str(field_fault({**inner, "kinds": {"x": 7}}, 2))


class Blocks(BlockRule):
    """Momentum in one byte an element with a scale a block, and what it has seen of rows and columns."""

    block = 8

    def state(self, record: ParameterRecord) -> tuple[StateKind, ...]:
        if not record.decay or record.shape[-1] % self.block:
            return (StateKind("exp_avg"),)
        return (
            StateKind("codes", dtype=torch.int8), StateKind("scales", of="block", block=self.block),
            StateKind("row_sum", of="row"), StateKind("column_sum", of="column"),
        )

    def update_(self, piece: StateShard, settings: UpdateSettings) -> None:
        if "exp_avg" in piece.state:
            piece.master.sub_(piece.state["exp_avg"].mul_(0.5).add_(piece.gradient), alpha=settings.lr)
            return
        assert piece.start % self.block == 0 and len(piece.master) == self.block * len(piece.state["scales"])
        rows = piece.gradient.view(-1, self.block)
        codes, scales = piece.state["codes"].view(-1, self.block), piece.state["scales"].unsqueeze(1)
        momentum = (codes * scales).mul_(0.5).add_(rows)
        scales.copy_(momentum.abs().amax(1, keepdim=True) / 127)
        codes.copy_((momentum / scales.clamp_min(1e-30)).round())
        piece.master.view(-1, self.block).sub_(codes * scales, alpha=settings.lr)


def test_state_of_other_shapes_and_dtypes_resumes_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS._added, "blocks", Blocks())
    config = RunConfig(
        engine="native", seed=5, model=MODEL, batch=BatchConfig(global_batch_size=2),
        optimizer=OptimizerConfig(name="blocks"), precision=PrecisionConfig(dtype="bf16"),
    )
    whole, first = engine_of(config), engine_of(config)
    for engine in (whole, first):  # what no update here writes
        for i, one in enumerate(engine.sharded.reduced):
            one.tensor.copy_(torch.arange(one.tensor.numel()).view_as(one.tensor) + i)
    train(whole, 0, 4)
    train(first, 0, 2)
    path = save(first, config, tmp_path, 2)
    assert '"version":3' in (path / "manifest.json").read_text()
    checkpoint = open_checkpoint(path)
    name = "layers.1.mlp.up.weight"
    assert checkpoint.dtype(name, "codes") == torch.int8 and checkpoint.shape(name, "codes") == (64, 16)
    assert checkpoint.shape(name, "scales") == (64, 2) and checkpoint.shape(name, "row_sum") == (64,)
    assert checkpoint.shape(name, "column_sum") == (16,) and "exp_avg" in checkpoint.kinds()
    again = resumed(config, checkpoint)
    train(again, 2, 2)
    want, found = state(whole), state(again)
    assert want.keys() == found.keys() and all(torch.equal(want[key], found[key]) for key in want)
    shapes = read_manifest(path).state.shapes
    assert shapes[name]["scales"] == (64, 2)
    out = export_dcp(checkpoint, tmp_path / "dcp")
    (tmp_path / "staged").mkdir()
    back = open_checkpoint(commit_import(read_dcp(out, Stage(tmp_path / "staged")), tmp_path / "back", source=out))
    assert back.kinds() == checkpoint.kinds() and back.shape(name, "scales") == (64, 2)
    monkeypatch.setattr(Blocks, "block", 4)  # the same rule with other blocks
    with pytest.raises(ConfigError, match=r"scales of .* is torch.float32 .*, and the optimizer keeps"):
        check_resumable(checkpoint, config)


def test_a_tensor_of_another_shape_than_declared_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OPTIMIZERS._added, "blocks", Blocks())
    config = RunConfig(engine="native", model=MODEL, optimizer=OptimizerConfig(name="blocks"))
    engine, records = engine_of(config), state_records(config.model)
    saved = state_of(engine, config, Position(step=1, samples=2, skipped=0), records)
    shapes = {name: {**each, "scales": (1, 2)} for name, each in saved.shapes.items()}
    with pytest.raises(CheckpointError, match=r"scales of .* was saved as .*; the optimizer's rule says \(1, 2\)"):
        save_checkpoint(tmp_path, replace(saved, shapes=shapes), engine.state_pieces(), expected=shapes_of(records))
    path = save_checkpoint(tmp_path, saved, engine.state_pieces(), expected=shapes_of(records))
    body = json.loads((path / "manifest.json").read_text())["manifest"]
    from megatron_port.core.checkpoint.format import _Parser

    with pytest.raises(DamagedCheckpoint, match="the shapes of .* differ from kind to kind"):
        _Parser("here", 3).manifest({**body, "shapes": {}})
    with pytest.raises(DamagedCheckpoint, match="shapes.x is 7"):
        _Parser("here", 3).manifest({**body, "shapes": {"x": 7}})


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_state_lies_where_its_parameters_do(shards: int) -> None:
    """No block is in two shares, and what only some parameters have takes memory for those."""
    mesh = Topology(dp=shards).mesh
    records = [
        slice_record("a", (3, 48), init=InitSpec("zeros"), decay=True),
        slice_record("b", (7,), init=InitSpec("zeros"), decay=False),
        slice_record("c", (5, 24), init=InitSpec("zeros"), decay=True),
    ]
    rule = Blocks()
    rule.block = 24  # no divisor of what buckets are aligned to anyway
    listed = [(i, r, r.numel) for i, r in enumerate(records)]
    (plan,) = plan_buckets(
        [listed], mesh, reduce_dims=mesh.dims("dp"), split=True, capacity=1000, align=rule.alignment
    )
    seen = {(kind.name, i): [0] * torch.Size(kind.shape(r)).numel() for i, r in enumerate(records)
            for kind in rule.state(r)}
    for shard in range(shards):
        for layout in state_layouts(plan, shard, records, rule):
            end = 0
            for r in layout.ranges:
                assert r.at >= end and (end := r.at + r.numel) <= layout.numel
                for e in range(r.start, r.start + r.numel):
                    seen[layout.kind.name, r.index][e] += 1
            if layout.kind.name == "exp_avg":
                assert layout.numel in (0, ALIGN)
            if layout.kind.name == "scales":
                assert all(r.numel for r in layout.ranges)
    for (name, _), counts in seen.items():
        assert set(counts) == {shards if name in ("row_sum", "column_sum") else 1}


def test_a_layout_that_cuts_a_block_is_refused() -> None:
    record = slice_record("layers.0.mlp.down.weight", (4, 32), init=InitSpec("zeros"), decay=True)
    half = replace(record, local_shape=(4, 12), extent=(4, 12), shards=(Shard(1, ("tp",)),))
    kind = StateKind("scales", of="block", block=8)
    assert kind.place(replace(half, local_shape=(4, 16), extent=(4, 16))).local_shape == (4, 2)
    with pytest.raises(ConfigError, match="a value for each block of 8 elements of a row, and this rank holds 12"):
        kind.place(half)


def reference(name: str, p: torch.Tensor, options: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer of torch that a rule follows."""
    if name == "sgd":
        sgd = options.sgd
        return torch.optim.SGD([p], lr=0.01, momentum=sgd.momentum, dampening=sgd.dampening, nesterov=sgd.nesterov,
                               weight_decay=0.1)
    return torch.optim.Adagrad([p], lr=0.01, eps=0.03, weight_decay=0.1,
                               initial_accumulator_value=options.adagrad.initial_accumulator)


@pytest.mark.parametrize(("name", "options"), [
    ("sgd", OptimizerConfig(name="sgd")), ("adagrad", OptimizerConfig(name="adagrad")),
    ("adagrad", OptimizerConfig(name="adagrad", adagrad=AdagradOptions(initial_accumulator=0.3))),
    ("sgd", OptimizerConfig(name="sgd", sgd=SGDOptions(momentum=0.8, nesterov=True))),
    ("sgd", OptimizerConfig(name="sgd", sgd=SGDOptions(momentum=0.8, dampening=0.3))),
    ("sgd", OptimizerConfig(name="sgd", sgd=SGDOptions(momentum=0.0))),
])
def test_rules_of_elements_are_torchs(name: str, options: OptimizerConfig) -> None:
    rule, generator = rule_of(options), torch.Generator().manual_seed(3)
    assert isinstance(rule, ElementwiseRule)
    p = torch.randn(300, dtype=torch.float64, generator=generator)
    mine, record = p.clone(), slice_record("p", (300,), init=InitSpec("zeros"), decay=True)
    kept = {kind: torch.zeros_like(p) for kind in rule.kinds(record)}
    theirs = reference(name, p, options)
    for step in range(1, 12):
        p.grad = torch.randn(300, dtype=torch.float64, generator=generator)
        settings = UpdateSettings(step=step, lr=0.01, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=0.03)
        rule.update_(mine[:100], p.grad[:100].clone(), {k: v[:100] for k, v in kept.items()}, settings)
        rule.update_(mine[100:], p.grad[100:].clone(), {k: v[100:] for k, v in kept.items()}, settings)
        theirs.step()
        torch.testing.assert_close(mine, p.detach(), rtol=1e-14, atol=1e-14)


def test_adagrads_momentum_is_a_mean_of_updates() -> None:
    """Against plain Python."""
    options = AdagradOptions(momentum=0.8, initial_accumulator=0.2)
    rule = rule_of(OptimizerConfig(name="adagrad", adagrad=options))
    assert isinstance(rule, ElementwiseRule)
    generator = torch.Generator().manual_seed(2)
    master = torch.randn(5, dtype=torch.float64, generator=generator)
    kept = {kind: torch.zeros_like(master) for kind in ("sum", "exp_avg")}
    w, v, m = master.tolist(), [0.2] * 5, [0.0] * 5
    for step in range(1, 11):
        g = torch.randn(5, dtype=torch.float64, generator=generator)
        for i, x in enumerate(g.tolist()):
            x += 0.3 * w[i]
            v[i] += x * x
            m[i] = 0.8 * m[i] + 0.2 * x / (v[i] ** 0.5 + 1e-3)
            w[i] -= 0.01 * m[i]
        rule.update_(master, g, kept, UpdateSettings(step=step, lr=0.01, weight_decay=0.3, beta1=0, beta2=0, eps=1e-3))
    torch.testing.assert_close(master, torch.tensor(w, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_lion_is_the_papers_formula() -> None:
    """Against plain Python (Chen et al., arXiv 2302.06675, algorithm 2)."""
    rule = rule_of(OptimizerConfig(name="lion"))
    assert isinstance(rule, ElementwiseRule)
    generator = torch.Generator().manual_seed(1)
    master, kept = torch.randn(5, dtype=torch.float64, generator=generator), torch.zeros(5, dtype=torch.float64)
    w, m = master.tolist(), [0.0] * 5
    for step in range(1, 21):
        g = torch.randn(5, dtype=torch.float64, generator=generator)
        g[1] = 0.0  # has no direction
        for i, x in enumerate(g.tolist()):
            u = 0.9 * m[i] + 0.1 * x
            w[i] -= 0.01 * ((u > 0) - (u < 0) + 0.3 * w[i])
            m[i] = 0.99 * m[i] + 0.01 * x
        rule.update_(master, g, {"exp_avg": kept},
                     UpdateSettings(step=step, lr=0.01, weight_decay=0.3, beta1=0.9, beta2=0.99, eps=0))
    torch.testing.assert_close(master, torch.tensor(w, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_another_rule_starts_fresh_where_that_is_said(mixed: RunConfig, tmp_path: Path) -> None:
    engine = engine_of(mixed)
    train(engine, 0, 1)
    manifest = read_manifest(save(engine, mixed, tmp_path, 1))
    other = replace(mixed, optimizer=OptimizerConfig(name="lion"), checkpoint=CheckpointConfig(optimizer_state="fresh"))
    assert starts_fresh(manifest, other) and not starts_fresh(manifest, replace(other, optimizer=mixed.optimizer))
    check_rule(manifest, other, "there")
    check_resumable(open_checkpoint(tmp_path / "step-00000001"), other, fresh=True)
    assert not starts_fresh(manifest, replace(other, checkpoint=CheckpointConfig()))
