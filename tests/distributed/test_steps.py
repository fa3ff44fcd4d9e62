"""Runs of more than a few steps, changing batch sizes, and DeepSpeed's own Adam."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import pytest
import torch
from cases import LR, make_batches, make_config, run_cases, single_run, within_rounding
from pool import RankPool

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.data.dataset import SyntheticDataset
from megatron_port.core.data.loader import RankView, ReplicaShare, StepLoader
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.dist.record import StatePiece, StateReader
from megatron_port.core.engine.api import Engine
from megatron_port.core.layers.providers import torch_providers
from megatron_port.ext.kernels.jit_guard import prebuilt_deepspeed_ops
from megatron_port.run.build import build_engine
from megatron_port.tools.parity.comparison import FP64, Run, compare

MODEL = {"tie_embeddings": True, "hidden_dropout": 0.1}


def _equal(reference: Run, traces: Sequence, config: RunConfig, tolerance: object, lr: float = 0.0) -> None:
    deviations = compare(reference, Run.of(traces), tolerance, config.model, lr=lr)  # type: ignore[arg-type]
    assert all(d.ok for d in deviations), "\n".join(map(str, deviations))


def test_twenty_steps_in_fp64(ranks: RankPool) -> None:
    config = make_config(dtype="fp64", model=MODEL, layout={"sequence_parallel": True, "pipeline_schedule": "1f1b"})
    results = ranks.run(8, run_cases, [(config, Topology(2, 2, 2), 20, 1)])
    _equal(single_run(config, steps=20), [r[0] for r in results], config, FP64, LR)


def test_twenty_steps_in_fp32_on_deepspeed(ranks: RankPool) -> None:
    """Free-running: the larger of the fp32 bound and twice what reordering changes."""
    config = make_config(engine="deepspeed", model=MODEL)
    topology = Topology(2, 2, 2)
    results = ranks.run(8, run_cases, [(config, topology, 20, 1)], deepspeed=True, timeout=200)
    run = Run.of([r[0] for r in results])
    deviations = within_rounding(config, topology, run, lambda order: single_run(config, steps=20, order=order))
    assert all(d.ok for d in deviations), "\n".join(map(str, deviations))


SIZES = (4, 4, 8, 16, 8)
"""Global batches of a ramp-up (and one step down)."""


def _ramp(config: RunConfig, topology: Topology) -> list[tuple[float, float | None, int]]:
    ctx = ParallelContext.create(topology, "cpu")
    engine = build_engine(config, ctx, torch_providers())
    out = []
    for step, size in enumerate(SIZES):
        at = dataclasses.replace(config, batch=dataclasses.replace(config.batch, global_batch_size=size))
        r = engine.train_step(make_batches(at, ctx)(step), step=step, lr=LR)
        out.append((r.loss, r.grad_norm, r.tokens))
    out.append(_evaluated(config, ctx, engine))
    return out


def _evaluated(config: RunConfig, ctx: ParallelContext, engine: Engine) -> tuple[float, float | None, int]:
    """Over a split of 21 samples in batches of 16: the last has 5, in as many micro-batches as they need."""
    model = config.model
    data = SyntheticDataset(seq_length=model.seq_length, vocab_size=model.vocab_size, seed=3, samples=21)
    loader = StepLoader(
        data, ReplicaShare(config.batch.micro_batch_size, ctx.index("dp"), ctx.topology.dp),
        seq_length=model.seq_length, seed=0, view=RankView.on(config, ctx),
    )
    found = [engine.eval_step(batch) for batch in loader.eval_batches(99, 16)]
    tokens = sum(f.tokens for f in found)
    assert tokens == 21 * model.seq_length
    return sum(f.loss_sum for f in found) / tokens, 1.0, tokens


@pytest.mark.parametrize("engine", ["native", "deepspeed"])
def test_a_batch_that_grows(ranks: RankPool, engine: str) -> None:
    """Then an evaluation of a split that the batch does not divide."""
    config = make_config(engine=engine, model=MODEL, micro_batch_size=2, global_batch_size=16, mask_loss=True)
    reference = _ramp(dataclasses.replace(config, engine="native"), Topology())
    for steps in ranks.run(4, _ramp, config, Topology(1, 2, 2), deepspeed=engine == "deepspeed"):
        for ours, theirs in zip(steps, reference):
            assert ours[2] == theirs[2]
            assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
            assert ours[1] == pytest.approx(theirs[1], rel=1e-4)


def _own_gradients(config: RunConfig, rank: int) -> dict[str, torch.Tensor]:
    """What one of two replicas adds up by itself in the first step."""
    topology = Topology(dp=2)
    ctx = ParallelContext(topology, rank, torch.device("cpu"), topology.coordinates(rank))
    engine = build_engine(config, ctx, torch_providers())
    found: dict[str, torch.Tensor] = {}
    engine.on_gradients = lambda grads: found.update({r.name: g.clone() for r, g in grads})  # type: ignore[attr-defined]
    engine.train_step(make_batches(config, ctx)(0), step=0, lr=LR)
    return found


@pytest.mark.parametrize(("name", "dtype", "zero_stage"), [("bf16", torch.bfloat16, 1), ("fp16", torch.float16, 0)])
def test_gradients_travel_between_replicas_as_asked(
    ranks: RankPool, name: Literal["bf16", "fp16"], dtype: torch.dtype, zero_stage: int
) -> None:
    """Each replica's sum is rounded once, and so is the sum of the two; nothing else is."""
    config = make_config(layout={"zero_stage": zero_stage})
    config = dataclasses.replace(config, precision=dataclasses.replace(config.precision, grad_reduce_dtype=name))
    found = Run.of([r[0] for r in ranks.run(2, run_cases, [(config, Topology(dp=2), 1, 1)])]).gradients[0]
    alone = dataclasses.replace(config, layout=dataclasses.replace(config.layout, zero_stage=0))
    first, second = (_own_gradients(alone, rank) for rank in range(2))
    assert found.keys() == first.keys()
    for key, gradient in found.items():
        wanted = (first[key].to(dtype) + second[key].to(dtype)).double()
        assert torch.equal(gradient, wanted), key


def _reader(saved: dict[tuple[str, str], StatePiece]) -> StateReader:
    return lambda name, kind, offset, shape, out=None: saved[name, kind].tensor.view(shape)


def _with_adam(config: RunConfig, topology: Topology, provider: str, resume_at: int) -> list[float]:
    """Losses of six steps, with the state handed to a fresh engine after ``resume_at`` of them."""
    ctx = ParallelContext.create(topology, "cpu")
    providers = dataclasses.replace(torch_providers(), optimizer=provider)
    engine = build_engine(config, ctx, providers)
    batches = make_batches(config, ctx)
    losses = []
    for step in range(6):
        if step == resume_at:
            saved: dict[tuple[str, str], StatePiece] = {
                (p.name, p.kind): dataclasses.replace(p, tensor=p.tensor.clone()) for p in engine.state_pieces()
            }
            scalars = engine.scalar_state()
            engine = build_engine(config, ctx, providers, initialise=False)
            engine.load_state(_reader(saved), scalars)
        result = engine.train_step(batches(step), step=step, lr=LR)
        losses.append(result.loss)
    return losses


@pytest.mark.skipif(not prebuilt_deepspeed_ops().get("cpu_adam"), reason="DeepSpeed's cpu_adam was not built ahead")
def test_cpu_adam_is_torchs_and_resumes(ranks: RankPool) -> None:
    """The update that `make quickstart ENGINE=deepspeed` uses."""
    config = make_config(engine="deepspeed", model=MODEL)
    torchs = ranks.run(1, _with_adam, config, Topology(), "torch", 99, deepspeed=True)[0]
    theirs = ranks.run(1, _with_adam, config, Topology(), "deepspeed", 99, deepspeed=True)[0]
    assert theirs == pytest.approx(torchs, rel=1e-5)
    assert ranks.run(1, _with_adam, config, Topology(), "deepspeed", 3, deepspeed=True)[0] == theirs


def test_micro_batches_reach_only_the_stages_that_read_them() -> None:
    config = make_config()
    topology = Topology(pp=2)
    for rank, field in ((0, "tokens"), (1, "labels")):
        ctx = ParallelContext(topology, rank, ParallelContext.single().device, topology.coordinates(rank))
        for batch in make_batches(config, ctx)(0):
            assert isinstance(batch, MicroBatch)
            assert {f for f in ("tokens", "labels") if getattr(batch, f) is not None} == {field}
