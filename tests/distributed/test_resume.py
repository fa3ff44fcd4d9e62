"""Going on from a checkpoint: to the bit in the same layout, and from any layout and engine to any other."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import make_config
from pool import RankPool

from megatron_port.core.checkpoint.format import SavedState, directory_name
from megatron_port.core.checkpoint.reader import Checkpoint, open_checkpoint
from megatron_port.core.checkpoint.writer import peers_of, save_checkpoint
from megatron_port.core.config.schema import MoEConfig, RunConfig
from megatron_port.core.data.loader import build_loaders
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.dist.positions import sequence_partition
from megatron_port.core.engine.api import Engine, StepResult
from megatron_port.core.layers.providers import torch_providers
from megatron_port.core.model.shapes import buffer_shapes, parameter_shapes
from megatron_port.core.optim.rules import ADAMW, mixed_kinds, state_kinds
from megatron_port.core.optim.schedules import BatchSchedule, learning_rate
from megatron_port.run.build import build_engine, state_records

STEPS = 10
SAVES = (1, 3, 4, 7, 9)


@dataclass
class Record:
    """What one rank saw of a run, and what it held at the end."""

    results: list[StepResult] = field(default_factory=list)
    sample_ids: list[list[tuple[int, ...]]] = field(default_factory=list)
    pieces: dict[tuple[str, str, int], torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, float | int] = field(default_factory=dict)
    eval_loss: float = 0.0


def differences(a: Record, b: Record, start: int) -> list[str]:
    """Everything in which two records differ, ``b`` holding the steps from ``start`` on. No tolerance."""
    out = []
    for i, (x, y) in enumerate(zip(a.results[start:], b.results, strict=True)):
        if x != y:
            out.append(f"step {start + i}: {x} against {y}")
    if a.sample_ids[start:] != b.sample_ids:
        out.append("data order")
    for what in ("pieces", "weights"):
        mine, theirs = getattr(a, what), getattr(b, what)
        if mine.keys() != theirs.keys():
            out.append(f"{what}: {sorted(map(str, mine.keys() ^ theirs.keys()))}")
        out += [f"{what} {k}" for k in mine if k in theirs and not torch.equal(mine[k], theirs[k])]
    if a.scalars != b.scalars:
        out.append(f"scalars {a.scalars} against {b.scalars}")
    if a.eval_loss != b.eval_loss:
        out.append(f"evaluation {a.eval_loss} against {b.eval_loss}")
    return out


class Rank:
    """A run on this rank as the training loop makes it: synthetic corpus, warm-up and decay, dropout on."""

    def __init__(self, config: RunConfig, topology: Topology, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.ctx = ParallelContext.create(topology, "cpu")
        self.batches = BatchSchedule(config.batch, topology.dp)
        self.loaders = build_loaders(
            config, dp_rank=self.ctx.index("dp"), dp_size=topology.dp, need_tokens=self.ctx.is_first_stage,
            need_labels=self.ctx.is_last_stage,
            partition=sequence_partition(self.ctx.mesh, self.ctx.rank, order=config.layout.cp_order),
        )

    def engine(self, *, initialise: bool) -> Engine:
        return build_engine(self.config, self.ctx, torch_providers(), initialise=initialise)

    def train(self, engine: Engine, record: Record, start: int, stop: int) -> None:
        for step in range(start, stop):
            first, size = self.batches.step_plan(step)
            micro_batches = self.loaders.train.step(first, size)
            record.sample_ids.append([b.sample_ids for b in micro_batches])
            lr = learning_rate(self.config.optimizer, step, STEPS)
            record.results.append(engine.train_step(micro_batches, step=step, lr=lr))

    def finish(self, engine: Engine, record: Record) -> Record:
        record.pieces = {(p.name, p.kind, p.flat_start): p.tensor.detach().clone() for p in engine.state_pieces()}
        record.weights = {r.name: p.detach().clone() for r, p in engine.named_parameters()}
        record.scalars = engine.scalar_state()
        record.eval_loss = engine.eval_step(self.loaders.train.step(0, self.config.batch.global_batch_size)).loss
        return record

    def save(self, engine: Engine, step: int, folder: Path | None = None) -> Path:
        samples, records = self.batches.samples_before(step), state_records(self.config.model)
        state = SavedState(
            step=step, samples=samples, tokens=samples * self.config.model.seq_length, layout=self.config.layout,
            config={}, scalars=engine.scalar_state(), extra={},
            kinds=mixed_kinds(state_kinds(ADAMW, records.values())),
        )
        return save_checkpoint(
            folder or self.folder, state, engine.state_pieces(), peers=peers_of(dist.group.WORLD),
            expected={name: record.shape for name, record in records.items()},
        )

    def load(self, step: int, *, weights_only: bool = False) -> tuple[Engine, Checkpoint]:
        engine = self.engine(initialise=False)
        checkpoint = open_checkpoint(self.folder / directory_name(step))
        assert checkpoint.manifest.state.samples == self.batches.samples_before(checkpoint.step)
        if weights_only:
            engine.load_weights(checkpoint.read)
        else:
            engine.load_state(checkpoint.read, checkpoint.scalars)
        return engine, checkpoint


def straight_and_resumed(config: RunConfig, topology: Topology, folder: Path) -> dict[str, object]:
    """Train to STEPS, saving on the way; then resume from each save in a fresh engine. By save: what differs."""
    rank = Rank(config, topology, folder)
    straight, engine = Record(), rank.engine(initialise=True)
    for start, stop in zip((0, *SAVES), (*SAVES, STEPS)):
        rank.train(engine, straight, start, stop)
        if stop < STEPS:
            rank.save(engine, stop)
    rank.finish(engine, straight)
    out: dict[str, object] = {}
    # What resumes from the first save does not save again: it also shows that saving leaves no trace.
    for k in SAVES:
        resumed, (engine, checkpoint) = Record(), rank.load(k)
        rank.train(engine, resumed, checkpoint.step, STEPS)
        out[f"from {k}"] = differences(straight, rank.finish(engine, resumed), k)
    k = SAVES[3]
    fresh_moments, (engine, _) = Record(), rank.load(k, weights_only=True)
    rank.train(engine, fresh_moments, k, STEPS)
    out["moments forgotten"] = differences(straight, rank.finish(engine, fresh_moments), k)
    other_step, (engine, _) = Record(), rank.load(k)
    rank.train(engine, other_step, k + 1, k + 2)
    out["step off by one"] = other_step.results[0].loss != straight.results[k].loss
    out["results"] = straight.results
    return out


EXPERTS = MoEConfig(
    num_experts=4, ffn_hidden_size=24, first_dense=1, balance_bias=True, balance_loss="previous_step",
)


def config_of(
    engine: str, dtype: str, num_layers: int = 4, *, moe: MoEConfig | None = None, **changes: object
) -> RunConfig:
    """Dropout on, an odd vocabulary, clipping active, a schedule whose rate differs at every step."""
    layout = {"sequence_parallel": True, "vocab_padding_multiple": 8, **changes}
    model: dict[str, Any] = {
        "num_layers": num_layers, "num_query_groups": 2, "hidden_dropout": 0.1, "attention_dropout": 0.1,
        "moe": moe or MoEConfig(),
    }
    config = make_config(
        engine=engine, dtype=dtype, model=model, layout=layout, micro_batch_size=1, global_batch_size=4
    )
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, synthetic=True),
        optimizer=dataclasses.replace(config.optimizer, warmup_steps=2, min_lr=1e-4),
        precision=dataclasses.replace(config.precision, initial_loss_scale=2.0**22, loss_scale_window=3),
    )


@pytest.mark.parametrize(
    ("engine", "dtype", "topology"),
    [
        pytest.param("native", "bf16", Topology(tp=2, dp=2), marks=pytest.mark.slow),
        ("native", "fp16", Topology(cp=2, dp=2)),
        pytest.param("deepspeed", "fp32", Topology(pp=2, dp=2), marks=pytest.mark.slow),
        ("deepspeed", "bf16", Topology(tp=2, pp=2)),
    ],
    ids=lambda v: v if isinstance(v, str) else v.sizes(),
)
def test_resume_is_bit_exact(ranks: RankPool, tmp_path: Path, engine: str, dtype: str, topology: Topology) -> None:
    """Loss, gradient norm, weights, masters, moments, dropout, data order, loss scale and its counters."""
    config = config_of(engine, dtype, num_layers=2, context_parallel_size=topology.cp)
    results = ranks.run(4, straight_and_resumed, config, topology, tmp_path, deepspeed=engine == "deepspeed")
    for rank, said in enumerate(results):
        for what in (f"from {k}" for k in SAVES):
            assert said[what] == [], (rank, what, said[what][:5])
        assert said["moments forgotten"], "a fresh optimizer goes unnoticed"
        assert said["step off by one"], "another step's samples and dropout go unnoticed"
    steps: list[StepResult] = results[0]["results"]
    assert len({r.loss for r in steps}) == STEPS
    if dtype == "fp16":
        # The scale fell and rose around the saves, or the counters would not be tested.
        scales = [r.loss_scale for r in steps]
        assert any(r.skipped for r in steps) and any(a < b for a, b in zip(scales, scales[1:])), scales
    else:
        assert all(r.grad_norm is not None and r.grad_norm > config.optimizer.clip_grad for r in steps[:3])


# ---------------------------------------------------------------- another layout, another engine


def train_and_save(config: RunConfig, topology: Topology, folder: Path, step: int) -> StepResult:
    """Train ``step`` steps, save, and take one more; its result."""
    rank, record = Rank(config, topology, folder), Record()
    engine = rank.engine(initialise=True)
    rank.train(engine, record, 0, step)
    rank.save(engine, step)
    rank.train(engine, record, step, step + 1)
    return record.results[-1]


def load_save_step(config: RunConfig, topology: Topology, folder: Path, again: Path, step: int) -> StepResult:
    """Load another layout's checkpoint, save it at once to ``again``, and take one step."""
    rank, record = Rank(config, topology, folder), Record()
    engine, checkpoint = rank.load(step)
    rank.save(engine, step, again)
    for r, p in engine.named_parameters():
        master = checkpoint.read(r.name, "weight", r.offset, r.extent)
        assert torch.equal(r.local_view(p.detach()), master.to(p.dtype)), r.name
    rank.train(engine, record, step, step + 1)
    return record.results[-1]


PAIRS = [
    ("deepspeed", Topology(tp=4, kv_copies=2), "native", Topology(tp=2), "fp32"),
    ("native", Topology(dp=2, cp=2), "deepspeed", Topology(tp=2, cp=2), "fp32"),
    ("deepspeed", Topology(pp=2, dp=2), "native", Topology(tp=4, kv_copies=2), "fp32"),
    ("native", Topology(tp=2, pp=2), "deepspeed", Topology(dp=2), "bf16"),
    ("native", Topology(pp=2, dp=2, vp=2, folded=True), "deepspeed", Topology(tp=2, pp=2), "fp32"),
    ("deepspeed", Topology(cp=2), "native", Topology(pp=2, dp=2, vp=2), "bf16"),
    ("native", Topology(tp=2, cp=2, ep=4), "native", Topology(pp=2, dp=2, ep=2), "fp32"),
    ("native", Topology(dp=4, ep=2), "deepspeed", Topology(cp=2), "fp32"),
]


"""Two key/value heads: on tp 4 each is held twice. With ep the model has experts, and their routers both buffers."""


def chunks_of(topology: Topology) -> dict[str, Any]:
    """The layout's fields that go with the topology's chunks, of the model and of sequences."""
    return {
        "virtual_pipeline_size": topology.vp, "pipeline_schedule": "zb-v" if topology.folded else "1f1b",
        "expert_parallel_size": topology.ep, "context_parallel_size": topology.cp,
    }


QUICK = (0, 4, 5, 6)
"""Between them both engines either way, key/value copies, chunks, context and expert parallelism; the rest are slow."""


@pytest.mark.parametrize("pair", [
    pytest.param(c, id=f"{c[0]} {c[1]} to {c[2]} {c[3]} {c[4]}", marks=() if i in QUICK else pytest.mark.slow)
    for i, c in enumerate(PAIRS)
])
def test_any_layout_loads_any_other(ranks: RankPool, tmp_path: Path, pair: tuple) -> None:
    """The state that arrives is the state that was saved, to the bit; the next step agrees within rounding."""
    from_engine, source, to_engine, target, dtype = pair
    moe = EXPERTS if source.ep > 1 else None
    first = config_of(from_engine, dtype, moe=moe, vocab_padding_multiple=8, **chunks_of(source))
    second = config_of(
        to_engine, dtype, moe=moe, vocab_padding_multiple=1, sequence_parallel=False, recompute="full",
        **chunks_of(target),
    )
    a = ranks.run(
        source.world_size, train_and_save, first, source, tmp_path / "a", 3, deepspeed=from_engine == "deepspeed"
    )[0]
    b = ranks.run(
        target.world_size, load_save_step, second, target, tmp_path / "a", tmp_path / "b", 3,
        deepspeed=to_engine == "deepspeed",
    )[0]
    one, two = (open_checkpoint(tmp_path / x / directory_name(3)) for x in "ab")
    parameters, buffers = parameter_shapes(first.model), buffer_shapes(first.model)
    assert set(one.names()) == set(two.names()) == set(parameters)
    assert not moe or set(one.names("buffer")) == set(two.names("buffer")) == set(buffers) != set()
    kinds = ("exp_avg", "exp_avg_sq", "weight")
    assert sorted(one.kinds()) == sorted(two.kinds()) == sorted((*kinds, *(["buffer"] if moe else [])))
    for kind in one.kinds():
        moved = 0.0
        for name, shape in (buffers if kind == "buffer" else parameters).items():
            box = (0,) * len(shape), shape
            before, after = one.read(name, kind, *box), two.read(name, kind, *box)
            assert before.dtype == after.dtype == torch.float32 and torch.equal(before, after), (name, kind)
            moved = max(moved, float(before.abs().max()))
        assert moved > 0.0, f"{kind} is zero everywhere"
    assert one.scalars == two.scalars and one.scalars["optimizer_steps"] == 3
    if dtype == "fp32":
        assert b.loss == pytest.approx(a.loss, rel=1e-5)
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-4)
    else:
        assert b.loss == pytest.approx(a.loss, rel=5e-3)
