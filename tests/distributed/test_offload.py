"""Offloaded state: equal to the bit to the same run without offload, whatever is offloaded, in every dtype."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch.distributed as dist
from offload_matrix import State, Steps, advance, case, engine_of, offloaded, state_of, train
from pool import RankPool
from stream_order import OrderChecker

from megatron_port.core.checkpoint.format import SavedState
from megatron_port.core.checkpoint.reader import open_checkpoint
from megatron_port.core.checkpoint.writer import peers_of, save_checkpoint
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist.device_streams import observed_by
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.model.shapes import parameter_shapes


def resume(first: RunConfig, second: RunConfig, topology: Topology, folder: Path) -> tuple[Steps, State]:
    """Three steps of one run, a checkpoint, and three more of another that resumes from it."""
    with engine_of(first, topology) as engine:
        results = advance(engine, range(3))
        save = SavedState(step=3, samples=0, tokens=0, layout=first.layout, config={},
                          scalars=engine.scalar_state(), extra={})
        path = save_checkpoint(folder, save, engine.state_pieces(), peers=peers_of(dist.group.WORLD),
                               expected=parameter_shapes(first.model))
    with engine_of(second, topology, initialise=False) as engine:
        checkpoint = open_checkpoint(path)
        engine.load_state(checkpoint.read, checkpoint.scalars)
        return results + advance(engine, range(3, 6)), state_of(engine)


def resume_all(cases: list[tuple[RunConfig, RunConfig]], topology: Topology, folder: Path) -> list[tuple[Steps, State]]:
    return [resume(*case, topology, folder / str(number)) for number, case in enumerate(cases)]


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
    ranks: RankPool, topology: Topology, config: RunConfig, others: list[RunConfig], *, steps: int = 4,
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
            offloaded(three, folder, optimizer="nvme", weights="cpu", buffers=1), offloaded(three, fraction=0.4),
        ])


def test_other_rules(ranks: RankPool) -> None:
    """By own kernels and by torch's ops, with state of several kinds, widths and lengths."""
    with tempfile.TemporaryDirectory() as folder:
        for rule, dtype, zero, offload in (
            ("adamw-8bit", "bf16", 3, {"optimizer": "nvme", "weights": "cpu"}),
            ("lion", "fp32", 1, {"optimizer": "nvme", "fraction": 0.5}), ("adagrad", "bf16", 2, {"fraction": 0.5}),
        ):
            plain = case(dtype, zero, rule=rule, tied=zero != 3)
            assert_equal(ranks, TWO, plain, [offloaded(plain, folder, **offload)], steps=3)


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
        assert_equal(ranks, Topology(1, 2, 2), staged, [offloaded(staged, folder, optimizer="nvme")], steps=3,
                     observed=True)
        three = case("fp32", 3)
        assert_equal(ranks, TWO, three, [offloaded(three, weights="cpu")], steps=3, observed=True)


def test_checkpoints_do_not_know_where_state_lives(ranks: RankPool, tmp_path: Path) -> None:
    """Offloaded to the disk and back, under stage 1 and with weights on the host: the steps of an unbroken run."""
    plain = case("bf16", 1)
    three = case("bf16", 3, tied=False)
    disk = offloaded(plain, str(tmp_path), optimizer="nvme")
    host = offloaded(three, weights="cpu")
    cases = [(plain, plain), (plain, disk), (disk, plain), (three, three), (three, host), (host, three)]
    for rank in ranks.run(2, resume_all, cases, TWO, tmp_path, timeout=240.0):
        assert rank[1] == rank[0] and rank[2] == rank[0]
        assert rank[4] == rank[3] and rank[5] == rank[3]
        assert len(set(rank[0][0])) == 6
