"""What peers got wrong in silence with experts on several ranks, each by its name; two ranks beside one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from cases import _alone, make_batches, make_config, providers_of
from experts import ExpertTrace, run_rank
from pool import RankPool

from megatron_port.core.config.schema import MoEConfig, RunConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.dist.record import StatePiece
from megatron_port.core.engine.native import NativeEngine
from megatron_port.core.errors import NumericsError
from megatron_port.core.pipeline.schedules import make_schedule
from megatron_port.ext.experts.experts import Dispatched, announced_rows, plan_exchange, send_home
from megatron_port.ext.health.replicas import check_replicas
from megatron_port.run.build import build_engine
from megatron_port.tools.parity.comparison import FP64, Run, compare

EP2, TP2 = Topology(dp=2, ep=2), Topology(tp=2, ep=2)


def case(topology: Topology, model: dict[str, Any] | None = None, **moe: Any) -> RunConfig:
    """A step's clipping is active (``make_config``)."""
    return make_config(
        dtype="fp64", model={"num_layers": 2, "hidden_size": 16, **(model or {}), "moe": MoEConfig(
            num_experts=4, ffn_hidden_size=8, **moe)},
        layout={"expert_parallel_size": topology.ep, "sequence_parallel": topology.tp > 1, "zero_stage": 1},
        global_batch_size=4,
    )


def both(ranks: RankPool, config: RunConfig, topology: Topology) -> tuple[ExpertTrace, Sequence[ExpertTrace]]:
    """One process, and each rank."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = run_rank(_alone(config), Topology(), 2)
    finally:
        torch.set_num_threads(threads)
    return alone, ranks.run(2, run_rank, config, topology, 2)


def assert_as_one_process(ranks: RankPool, config: RunConfig, topology: Topology) -> None:
    """Losses, norms and gradients by name; routes token by token; counts and what balances to the bit."""
    alone, found = both(ranks, config, topology)
    assert sorted(alone.routes) == sorted(choice for rank in found for choice in rank.routes)
    for rank in found:
        for mine, theirs in zip(alone.tallies, rank.tallies, strict=True):
            for name, total in mine.items():
                torch.testing.assert_close(theirs[name], total, rtol=1e-11, atol=1e-12)
        assert all(torch.equal(b, alone.buffers[name]) for name, b in rank.buffers.items())
    deviations = compare(Run.of([alone.trace]), Run.of([rank.trace for rank in found]), FP64, config.model)
    assert all(d.ok for d in deviations), [d for d in deviations if not d.ok]


def test_gradients_of_experts_have_no_factor_of_ranks(ranks: RankPool) -> None:
    """Nor has what clipping makes of them: an expert is in the norm once, whichever rank has it."""
    assert_as_one_process(ranks, case(EP2), EP2)


def test_balance_and_z_losses_do_not_depend_on_the_layout(ranks: RankPool) -> None:
    """A sample's tokens are on two ranks, a batch is two micro-batches; the weights are large: nothing hides."""
    config = case(TP2, balance_loss="sequence", balance_weight=1.0, z_weight=0.1)
    assert_as_one_process(ranks, config, TP2)


@pytest.mark.parametrize("drop_by", ["position", "probability"])
def test_tokens_are_dropped_by_sample_and_not_by_rank(ranks: RankPool, drop_by: str) -> None:
    config = case(TP2, capacity_factor=0.75, drop_by=drop_by)
    assert_as_one_process(ranks, config, TP2)


def test_a_router_is_the_same_on_the_ranks_of_a_sequence(ranks: RankPool) -> None:
    """With the bias that balances, the random second expert and jitter, all of which are of a token."""
    config = case(TP2, top_k=2, second_expert="random", jitter=0.1, router_bias=True, balance_bias=True)
    assert_as_one_process(ranks, config, TP2)


def test_a_shared_expert_sees_every_token_once(ranks: RankPool) -> None:
    config = case(TP2, shared_ffn_hidden_size=8, shared_gate=True)
    assert_as_one_process(ranks, config, TP2)


def test_the_share_of_the_last_step_is_that_of_all_ranks(ranks: RankPool) -> None:
    assert_as_one_process(ranks, case(EP2, balance_loss="previous_step", balance_weight=1.0), EP2)


def exchange_unequal_rows() -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Rank 0 sends three rows to expert 1, which is rank 1's, and one to its own; rank 1 sends nothing."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    counts = torch.tensor([1, 3] if rank == 0 else [0, 0])
    exchange = plan_exchange(announced_rows(counts, group), counts, group)
    rows = (torch.arange(8.0).view(4, 2) if rank == 0 else torch.empty(0, 2)).requires_grad_()
    arrived, exchange = Dispatched(rows, exchange).arrive()
    home = send_home(arrived * (rank + 1.0), exchange)
    home.backward(torch.ones_like(home))
    assert rows.grad is not None
    return arrived.detach(), rows.grad, exchange.counts == ((1,) if rank == 0 else (3,))


def test_a_rank_that_sends_nothing_does_not_hang_the_others(ranks: RankPool) -> None:
    first, second = ranks.run(2, exchange_unequal_rows, timeout=60)
    assert first[0].tolist() == [[0.0, 1.0]] and second[0].tolist() == [[2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
    assert first[1].tolist() == [[1.0, 1.0], *[[2.0, 2.0]] * 3] and second[1].shape == (0, 2)
    assert first[2] and second[2]


def trained_pieces(config: RunConfig, topology: Topology, given: Sequence[StatePiece] = ()) -> list[StatePiece]:
    """What this rank saves after two steps; or of what others have saved, at once."""
    ctx = ParallelContext.create(topology, "cpu")
    try:
        engine = build_engine(config, ctx, providers_of(config))
        assert isinstance(engine, NativeEngine)
        batches = make_batches(config, ctx)
        if given:
            engine.load_state(reader_of(given), {"optimizer_steps": 2})
        for step in range(0 if given else 2):
            engine.train_step(batches(step), step=step, lr=1e-2)
        return [dataclasses.replace(piece, tensor=piece.tensor.clone()) for piece in engine.state_pieces()]
    finally:
        ctx.close()


def whole_tensors(pieces: Sequence[StatePiece]) -> dict[tuple[str, str], torch.Tensor]:
    """By name and kind; an element that nobody saved is NaN, and one that two have saved an error."""
    out: dict[tuple[str, str], torch.Tensor] = {}
    for piece in pieces:
        whole = out.setdefault((piece.name, piece.kind), torch.full(piece.global_shape, float("nan")).double())
        box = torch.arange(whole.numel()).view(whole.shape)
        for dim, (start, length) in enumerate(zip(piece.offset, piece.shape)):
            box = box.narrow(dim, start, length)
        places = box.flatten()[piece.flat_start : piece.flat_start + piece.tensor.numel()]
        assert bool(whole.view(-1)[places].isnan().all()), piece.name
        whole.view(-1)[places] = piece.tensor.double()
    return out


def reader_of(pieces: Sequence[StatePiece]) -> Any:
    """A reader of slices."""
    saved = whole_tensors(pieces)

    def read(name: str, kind: str, offset: tuple[int, ...], shape: tuple[int, ...], /, *, out: Any = None) -> Any:
        return saved[name, kind][tuple(slice(o, o + n) for o, n in zip(offset, shape))].clone()

    return read


def test_a_checkpoint_of_two_ranks_of_experts_is_whole_on_one_and_back(ranks: RankPool) -> None:
    """Weights, both moments, and what balances: every element once, and to the bit after a change of ep."""
    config = case(EP2, balance_bias=True, balance_loss="previous_step")
    saved = [piece for rank in ranks.run(2, trained_pieces, config, EP2) for piece in rank]
    expected = whole_tensors(saved)
    experts = [key for key in expected if "experts" in key[0]]
    assert len(experts) == 2 * 4 * 3 and not any(bool(t.isnan().any()) for t in expected.values())
    one = trained_pieces(_alone(config), Topology(), saved)
    back = [piece for rank in ranks.run(2, trained_pieces, config, EP2, one) for piece in rank]
    for found in (whole_tensors(one), whole_tensors(back)):
        assert found.keys() == expected.keys() and all(torch.equal(found[key], t) for key, t in expected.items())


def bytes_exchanged(config: RunConfig, topology: Topology) -> tuple[int, int]:
    """Bytes of rows that this rank sends in a training step, and the steps' exchanges of counts."""
    sent, counts, original = [0], [0], dist.all_to_all_single

    def count(output: torch.Tensor, rows: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if rows.is_floating_point():
            sent[0] += rows.nbytes
        else:
            counts[0] += 1
        return original(output, rows, *args, **kwargs)

    ctx = ParallelContext.create(topology, "cpu")
    dist.all_to_all_single = count  # type: ignore[assignment]
    try:
        engine = build_engine(config, ctx, providers_of(config))
        engine.train_step(make_batches(config, ctx)(0), step=0, lr=1e-2)
        return sent[0], counts[0]
    finally:
        dist.all_to_all_single = original
        ctx.close()


def test_rows_cross_four_times(ranks: RankPool) -> None:
    """4 · k · h numbers for each token and layer, those that stay on their rank included; and no more of anything."""
    config = case(EP2, top_k=3, shared_ffn_hidden_size=8)
    found = ranks.run(2, bytes_exchanged, config, EP2)
    tokens, layers, width = 4 * config.model.seq_length, 2, 8
    assert sum(rows for rows, _ in found) == 4 * 3 * 16 * width * tokens * layers
    assert all(counts == layers * 4 // 2 // config.batch.micro_batch_size for _, counts in found)


def filled_run(config: RunConfig, topology: Topology, fills: bool) -> tuple[dict[str, torch.Tensor], int, int]:
    """Gradients of a step, products computed, and those of them while rows were on their way."""
    ctx = ParallelContext.create(topology, "cpu")
    made = make_schedule if fills else lambda *args, exchanges: make_schedule(*args)
    try:
        engine = build_engine(config, ctx, providers_of(config))
        assert isinstance(engine, NativeEngine)
        seen: dict[str, torch.Tensor] = {}
        engine.on_gradients = lambda found: seen.update({r.name: g.clone() for r, g in found})
        with patch("megatron_port.core.engine.native_passes.make_schedule", made):
            engine.train_step(make_batches(config, ctx)(0), step=0, lr=1e-2)
        return seen, engine.target.accumulator.computed, engine.target.accumulator.beside
    finally:
        ctx.close()


def test_weight_passes_that_fill_exchanges_change_no_bit(ranks: RankPool) -> None:
    """One stage, four micro-batches: the weight passes of three run beside the next one's forward pass, all of their
    products between the start of an exchange and its end; each product once, and every sum in the same order."""
    config = case(EP2, top_k=2, shared_ffn_hidden_size=8)
    config = dataclasses.replace(
        config, layout=dataclasses.replace(config.layout, pipeline_schedule="zb-h1"),
        batch=dataclasses.replace(config.batch, global_batch_size=8, micro_batch_size=1),
        precision=dataclasses.replace(config.precision, dtype="fp32"),
    )
    plain, found = (ranks.run(2, filled_run, config, EP2, fills) for fills in (False, True))
    for (before, computed, none), (after, count, beside) in zip(plain, found, strict=True):
        assert before.keys() == after.keys() and all(torch.equal(g, after[name]) for name, g in before.items())
        assert (count, none) == (computed, 0) and beside == computed * 3 // 4


def flipped_copy(config: RunConfig, topology: Topology, what: str) -> str:
    """Check the replicas, change a copy on the last rank, check again; return what is said."""
    ctx = ParallelContext.create(topology, "cpu")
    try:
        engine = build_engine(config, ctx, providers_of(config))
        check_replicas(engine, ctx, step=1)
        held = {r.name.rpartition(".mlp.")[2]: p for r, p in (*engine.named_parameters(), *engine.buffers)}
        if ctx.rank == topology.world_size - 1:
            with torch.no_grad():
                held[what].view(-1)[3] += 1e-6
        try:
            check_replicas(engine, ctx, step=2)
        except NumericsError as error:
            return str(error)
        return ""
    finally:
        ctx.close()


@pytest.mark.parametrize(("topology", "what"), [
    (Topology(dp=4, ep=2), "experts.up.weight"), (Topology(tp=4, ep=2), "experts.down.weight"),
    (Topology(tp=2, dp=2, ep=4), "router.balance_bias"),
], ids=["over replicas", "over a part of tp", "of the bias"])
def test_copies_of_experts_are_compared(ranks: RankPool, topology: Topology, what: str) -> None:
    """They lie along what ep leaves of the replicas and of tp."""
    config = case(topology, balance_bias=True)
    for said in ranks.run(4, flipped_copy, config, topology, what):
        assert what in said and "rank 3" in said, said
