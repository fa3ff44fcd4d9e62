"""Offloaded state: equal to the bit to the same run without offload, whatever is offloaded, in every dtype."""

from __future__ import annotations

import dataclasses
import tempfile
from typing import Any

from cases import LR, make_batches, make_config, providers_of
from pool import RankPool

from megatron_port.config.offload import OffloadConfig, offload_problems
from megatron_port.config.schema import RunConfig
from megatron_port.engine.native import NativeEngine
from megatron_port.parallel.context import ParallelContext
from megatron_port.parallel.device_streams import observed_by
from megatron_port.parallel.stream_order import OrderChecker
from megatron_port.parallel.topology import Topology
from megatron_port.session.assemble import build_engine

Steps = list[tuple[Any, ...]]
State = dict[tuple[Any, ...], list[float]]


def case(dtype: str, zero: int, *, dp: int = 2, micro_batches: int = 2, **layout: Any) -> RunConfig:
    config = make_config(
        dtype=dtype, micro_batch_size=1, global_batch_size=micro_batches * dp, own_kernels="on",
        model={"num_layers": 3, "hidden_dropout": 0.1, "tie_embeddings": layout.pop("tied", True)},
        layout={"zero_stage": zero, "reduce_bucket_size": 4000, "data_parallel_size": dp, **layout},
    )
    if dtype == "fp16":  # the first steps overflow
        precision = dataclasses.replace(
            config.precision, initial_loss_scale=2.0**24, loss_scale_hysteresis=1, loss_scale_window=3
        )
        config = dataclasses.replace(config, precision=precision)
    return config


def offloaded(config: RunConfig, folder: str = "", **offload: Any) -> RunConfig:
    """The same run with ``[offload]``."""
    where = {"optimizer": "cpu", "buffers": 2, **offload}
    if where["optimizer"] == "nvme":
        where["nvme_path"] = folder
    checkpoint = dataclasses.replace(config.checkpoint, asynchronous=False)
    config = dataclasses.replace(config, offload=OffloadConfig(**where), checkpoint=checkpoint)
    assert not offload_problems(config)
    return config


# ---------------------------------------------------------------- on the ranks


def train(config: RunConfig, topology: Topology, steps: int) -> tuple[Steps, State]:
    """What each step returned, and masters and moments at the end."""
    layout = config.layout
    ctx = ParallelContext.create(
        dataclasses.replace(topology, vp=layout.virtual_pipeline_size, shard=layout.shard_size), "cpu"
    )
    try:
        engine = build_engine(config, ctx, providers_of(config))
        assert isinstance(engine, NativeEngine)
        batches = make_batches(config, ctx)
        results: Steps = []
        for step in range(steps):
            found = engine.train_step(batches(step), step=step, lr=LR)
            results.append((found.loss, found.grad_norm, found.skipped, found.loss_scale))
            assert engine.state_damage() is None
        results.append((engine.eval_step(batches(steps)).loss,))
        state = {(p.name, p.kind, p.offset, p.flat_start): p.tensor.tolist() for p in engine.state_pieces()}
        assert engine.state_damage(now=True) is None
        return results, state
    finally:
        ctx.close()


def train_all(cases: list[tuple[RunConfig, Topology]], steps: int, observed: bool) -> list[tuple[Steps, State]]:
    """Several runs on the same ranks; ``observed``: each under the happens-before checker."""
    out = []
    for config, topology in cases:
        if observed:
            with observed_by(OrderChecker()):
                out.append(train(config, topology, steps))
        else:
            out.append(train(config, topology, steps))
    return out


def assert_equal(
    ranks: RankPool, topology: Topology, config: RunConfig, others: list[RunConfig], *, steps: int = 6,
    observed: bool = False,
) -> list[list[tuple[Steps, State]]]:
    cases = [(c, topology) for c in (config, *others)]
    results = ranks.run(topology.world_size, train_all, cases, steps, observed, timeout=60.0 + 30.0 * len(cases))
    for rank, (plain, *found) in enumerate(results):
        for other, run in zip(others, found, strict=True):
            assert run[0] == plain[0], (rank, other.offload, other.layout)
            assert run[1] == plain[1], (rank, other.offload, other.layout)
    return results


# ---------------------------------------------------------------- the tests

TWO = Topology(1, 1, 2)


def test_two_replicas_in_fp32_and_bf16(ranks: RankPool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        one = case("fp32", 1)
        assert_equal(ranks, TWO, one, [offloaded(one), offloaded(one, folder, optimizer="nvme", fraction=0.5)])
        three = case("bf16", 3, tied=False)
        assert_equal(ranks, TWO, three, [
            offloaded(three, weights="cpu"), offloaded(three, folder, optimizer="nvme", weights="cpu", buffers=1),
            offloaded(three, fraction=0.4),
        ])


def test_skipped_steps_in_fp16(ranks: RankPool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        two = case("fp16", 2)
        results = assert_equal(ranks, TWO, two, [offloaded(two, folder, optimizer="nvme")], steps=10)
        skipped = [bool(step[2]) for step in results[0][0][0][:-1]]
        assert 2 <= sum(skipped) <= 7


def test_nothing_races(ranks: RankPool) -> None:
    """Reductions, gathers, windows, transfers between stages and offload under the happens-before checker."""
    with tempfile.TemporaryDirectory() as folder:
        staged = case("bf16", 1, pipeline_parallel_size=2)
        assert_equal(ranks, Topology(1, 2, 2), staged, [
            offloaded(staged, folder, optimizer="nvme", buffers=1), offloaded(staged, fraction=0.5),
        ], steps=3, observed=True)
        three = case("fp32", 3)
        assert_equal(ranks, TWO, three, [offloaded(three, weights="cpu"), offloaded(three, folder, optimizer="nvme")],
                     steps=3, observed=True)
