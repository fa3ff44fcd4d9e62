"""Masks and few bits on every kind of layout, alone and with factors, shared layers and teachers: in fp64 the run of
one process, in bf16 within what rounding may do to it; the whole matrices are records."""

from __future__ import annotations

import pytest
from compressed import CHANGES, FEW_BITS, CompressedDraw, combined_draw, draw, few, hosted, on_layout, taught, together
from fuzz import failures, run_draws
from pool import RankPool

from megatron_port.core.dist.mesh import Topology


def draws(ranks: int) -> list[CompressedDraw]:
    """Pairs of what may interact."""
    pairs, share = CHANGES["2:4"], CHANGES["share"]
    if ranks == 2:
        return [
            on_layout(0, "llama", Topology(tp=2), pairs, sequence_parallel=True),
            on_layout(1, "both", Topology(dp=2), together(share, FEW_BITS["int8"], taught), zero_stage=3),
            on_layout(4, "factored llama", Topology(tp=2), together(pairs, few("int4", 8)), sequence_parallel=True,
                      recompute="full"),
            on_layout(6, "wide llama", Topology(tp=2), FEW_BITS["int8"], sequence_parallel=True, tp_overlap_chunks=2),
            on_layout(7, "gpt", Topology(tp=2), FEW_BITS["binary"], tp_overlap_chunks=2),
            on_layout(8, "wide llama", Topology(tp=2), together(pairs, FEW_BITS["int4"]), dtype="bf16",
                      sequence_parallel=True),
            on_layout(10, "gpt", Topology(dp=2), together(share, hosted), dtype="fp32", zero_stage=1,
                      reduce_bucket_size=4000),
        ]
    return [
        on_layout(2, "experts", Topology(tp=2, dp=2, ep=2), pairs, zero_stage=2),
        on_layout(5, "shared gpt", Topology(pp=2, dp=2), FEW_BITS["binary"], zero_stage=3),
        on_layout(3, "llama", Topology(pp=2, cp=2), together(share, taught), zero_stage=1, pipeline_schedule="zb-h1"),
        on_layout(9, "both", Topology(tp=2, pp=2), taught, dtype="bf16", sequence_parallel=True),
    ]


@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_a_layout_changes_nothing(ranks: RankPool, count: int) -> None:
    assert not failures(run_draws(ranks, draws(count)))


@pytest.mark.slow
def test_random_combinations(ranks: RankPool) -> None:
    assert not failures(run_draws(ranks, [draw(seed) for seed in range(16)]))
    assert not failures(run_draws(ranks, [combined_draw(seed) for seed in range(8)]))


@pytest.mark.slow
def test_half_precision(ranks: RankPool) -> None:
    """Every method by itself, and where ranks share key/value heads."""
    two, four = Topology(tp=2), Topology(tp=4)
    assert not failures(run_draws(ranks, [
        on_layout(20, "llama", two, CHANGES["2:4"], dtype="bf16", sequence_parallel=True),
        on_layout(21, "gpt", Topology(dp=2), CHANGES["share"], dtype="bf16", zero_stage=3),
        on_layout(22, "wide llama", two, FEW_BITS["int4"], dtype="bf16", sequence_parallel=True),
        on_layout(23, "wide llama", two, FEW_BITS["int8"], dtype="bf16"),
        on_layout(24, "gpt", two, FEW_BITS["binary"], dtype="bf16"),
        on_layout(25, "gpt", two, taught, dtype="bf16", sequence_parallel=True),
        on_layout(26, "both", two, together(), dtype="bf16", sequence_parallel=True),
        on_layout(27, "shared gpt", Topology(pp=2), together(), dtype="bf16"),
        on_layout(28, "factored llama", four, few("int8", 4), dtype="bf16"),
    ]))
