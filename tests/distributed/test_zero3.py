"""ZeRO stage 3: equal to the bit to the stages that keep whole weights, and to torch's FSDP2."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import LR, make_batches, make_config, providers_of, run_case
from fuzz import failures, run_draws
from matrix import zero3_matrix
from pool import RankPool

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.dist.record import record_of
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.step import StepSlot
from megatron_port.ext.memory.zero3 import UnitGather
from megatron_port.run.build import build_engine, build_model
from megatron_port.tools.parity.run_record import RankTrace, Slice

Case = tuple[RunConfig, Topology]


def case(
    zero: int, topology: tuple[int, int, int], *, dtype: str = "fp32", micro_batches: int = 2, layers: int = 5,
    tied: bool = True, **layout: Any,
) -> Case:
    """A run of three steps, (tp, pp, dp)."""
    tp, pp, dp = topology
    config = make_config(
        dtype=dtype, micro_batch_size=1, global_batch_size=micro_batches * dp,
        model={"num_layers": layers, "tie_embeddings": tied, "hidden_dropout": 0.1},
        layout={"zero_stage": zero, "reduce_bucket_size": 4000, "sequence_parallel": tp > 1, **layout},
    )
    return config, Topology(tp, pp, dp)


# ---------------------------------------------------------------- on the ranks


def train(whole: Case, sharded: Case, *, poison: bool = True, anomaly: bool = False) -> tuple[RankTrace, RankTrace]:
    """Both runs; the second with weights that turn into NaN when their unit has run."""
    one = run_case(*whole, 3)
    with pytest.MonkeyPatch.context() as patch, torch.autograd.set_detect_anomaly(anomaly, check_nan=False):
        if poison and sharded[0].layout.reshard == "forward":
            patch.setattr(UnitGather, "enter", poisoned(UnitGather.enter))
        return one, run_case(*sharded, 3)


def poisoned(enter: Any) -> Any:
    """``UnitGather.enter`` that first fills every window with NaN that the unit does not need."""

    def run(gather: UnitGather, unit: int) -> None:
        needed = gather._needs[unit]
        for window in gather.windows:
            if window.holder is not None and window.holder not in needed and not window.holder.gathering:
                window.flat.fill_(torch.nan)
                window.holder = None
        enter(gather, unit)

    return run


def train_all(pairs: list[tuple[Case, Case]], anomaly: bool = False) -> list[tuple[RankTrace, RankTrace]]:
    """Several pairs on the same ranks."""
    return [train(*pair, anomaly=anomaly) for pair in pairs]


def differences(one: RankTrace, other: RankTrace) -> list[str]:
    """What is not equal to the bit."""
    out = [
        name for name in ("losses", "grad_norms", "eval_loss", "final_eval_loss")
        if getattr(one, name) != getattr(other, name)
    ]
    pairs: list[tuple[Slice, Slice]] = []
    for mine, theirs in ((one.gradients[0], other.gradients[0]), (one.copies, other.copies)):
        assert len(mine) == len(theirs)
        pairs += zip(mine, theirs)
    return out + [a[0] for a, b in pairs if a[:3] != b[:3] or not torch.equal(a[3], b[3])]


def assert_equal(ranks: RankPool, world: int, pairs: list[tuple[Case, Case]], *, anomaly: bool = False) -> None:
    results = ranks.run(world, train_all, pairs, anomaly, timeout=60.0 + 60.0 * len(pairs))
    for rank, runs in enumerate(results):
        for (_, sharded), (one, other) in zip(pairs, runs):
            assert not differences(one, other), (rank, sharded[0].layout, differences(one, other))
            assert len(one.losses) == 3 and len(set(one.losses)) == 3


# ---------------------------------------------------------------- the tests


PLAN = ("norm1+norm2+activation", "qkv+core", "", "norm1+qkv+core+residual+norm2+hidden+activation", "core+norm2")
"""Sites that each layer recomputes."""


@pytest.mark.slow
def test_two_replicas_equal_whole_weights_to_the_bit(ranks: RankPool) -> None:
    """Of stage 2, whose sums it has, with several micro-batches; of stage 1 with one, where both add alike."""
    two = (1, 1, 2)
    assert_equal(ranks, 2, [
        (case(2, two), case(3, two)),
        (case(2, two, dtype="bf16", recompute="full"), case(3, two, dtype="bf16", recompute="full")),
        (case(2, two), case(3, two, recompute=PLAN)),
        (case(1, two, micro_batches=1, layers=2, tied=False), case(3, two, micro_batches=1, layers=2, tied=False)),
        (case(2, two, dtype="bf16"), case(3, two, dtype="bf16", reshard="step")),
    ])


def test_autograd_finds_nothing_wrong_with_windows(ranks: RankPool) -> None:
    two = (1, 1, 2)
    selective: dict[str, Any] = {"recompute": "selective", "layers": 3}
    assert_equal(ranks, 2, [(case(2, two, **selective), case(3, two, **selective))], anomaly=True)


SPLIT = {"zb-h1": 1, "zb-v": 1}
"""Stage whose sums stage 3 has: where backward passes are split, those of stage 1."""


def pipelines(names: tuple[tuple[str, int], ...]) -> list[tuple[Case, Case]]:
    """Pairs for schedules (name, chunks) on two stages with two replicas, tied and untied, either dtype."""
    out = []
    for i, (name, chunks) in enumerate(names):
        options: dict[str, Any] = {
            "dtype": ("fp32", "bf16")[i % 2], "layers": 5, "micro_batches": 3, "tied": i % 2 == 0,
            "pipeline_schedule": name, "virtual_pipeline_size": chunks,
        }
        layout = (1, 2, 2)
        out.append((case(SPLIT.get(name, 2), layout, **options), case(3, layout, **options)))
    return out


def test_four_ranks_equal_whole_weights_to_the_bit(ranks: RankPool) -> None:
    """Interleaved and folded pipelines; sequence parallelism; shards over two of four replicas."""
    hybrid: dict[str, Any] = {"shard_size": 2, "layers": 3}
    assert_equal(ranks, 4, [
        *pipelines((("1f1b", 2), ("zb-v", 2))),
        (case(2, (2, 1, 2)), case(3, (2, 1, 2))),
        (case(2, (1, 1, 4), **hybrid), case(3, (1, 1, 4), **hybrid)),
    ])


@pytest.mark.slow  # the others have an interleaved and a folded pipeline
def test_every_schedule_equals_whole_weights_to_the_bit(ranks: RankPool) -> None:
    assert_equal(ranks, 4, pipelines((("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("gpipe", 1), ("1f1b", 1))))


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
def test_sharded_weights_equal_one_process(ranks: RankPool, world: int) -> None:
    """fp64, within 1e-9; all of ``matrix.py --zero3`` were run once (benchmarks/results/parity-zero3.jsonl)."""
    draws = [d for d in zero3_matrix() if d.topology.world_size == world][:4]
    results = run_draws(ranks, draws)
    assert len(results) == len(draws) and not failures(results), failures(results)


# ---------------------------------------------------------------- FSDP2


def native_gradients(config: RunConfig) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the first step of this project's engine."""
    ctx = ParallelContext.create(Topology(dp=2), "cpu")
    try:
        engine: Any = build_engine(config, ctx, providers_of(config))
        found: dict[str, torch.Tensor] = {}
        engine.on_gradients = lambda grads: found.update({r.name: g.clone() for r, g in grads})
        result = engine.train_step(make_batches(config, ctx)(0), step=0, lr=LR)
        return result.loss, found
    finally:
        ctx.close()


def fsdp2_gradients(config: RunConfig) -> tuple[float, dict[str, torch.Tensor]]:
    """The same of the model in ``torch.distributed.fsdp.fully_shard``, from the engine's initial weights."""
    from torch.distributed.fsdp import fully_shard

    ctx = ParallelContext.create(Topology(dp=2), "cpu")
    try:
        whole = dataclasses.replace(config, layout=dataclasses.replace(config.layout, zero_stage=0))
        engine = build_engine(whole, ctx, providers_of(whole))
        initial = {r.name: p.detach().clone() for r, p in engine.named_parameters()}
        (model,) = build_model(config, ctx, providers_of(config), StepSlot(DropoutStream(config.seed, ctx.device)))
        names = {n: record_of(p).name for n, p in model.named_parameters()}
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.copy_(initial[names[n]])
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        model.train()
        batches, total = make_batches(config, ctx)(0), torch.zeros((), dtype=torch.float64)
        tokens = config.batch.global_batch_size * config.model.seq_length
        for batch in batches:
            assert batch.tokens is not None and batch.labels is not None
            logits = model(batch.tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.t().flatten(), reduction="sum")
            (loss * 2 / tokens).backward()  # FSDP2 divides by the two replicas
            total += loss.detach()
        dist.all_reduce(total)
        grads = {names[n]: p.grad.full_tensor() for n, p in model.named_parameters()}  # type: ignore[union-attr]
        return float(total) / tokens, grads
    finally:
        ctx.close()


def both_gradients(config: RunConfig) -> list[tuple[float, dict[str, torch.Tensor]]]:
    return [native_gradients(config), fsdp2_gradients(config)]


def test_gradients_are_those_of_fsdp2(ranks: RankPool) -> None:
    config, _ = case(3, (1, 1, 2), dtype="fp64", layers=3, tied=False)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, hidden_dropout=0.0))
    for (loss, grads), (their_loss, theirs) in ranks.run(2, both_gradients, config):
        assert loss == pytest.approx(their_loss, rel=1e-13)
        assert grads.keys() == theirs.keys()
        for name, g in grads.items():
            assert float((g - theirs[name]).abs().max()) <= 1e-12 * float(g.abs().max()) + 1e-15, name
