"""Masks and few bits on every kind of layout: in fp64 the run of one process; the whole matrices are records."""

from __future__ import annotations

import pytest
from compressed import CHANGES, FEW_BITS, CompressedDraw, draw, on_layout
from fuzz import failures, run_draws
from pool import RankPool

from megatron_port.parallel.topology import Topology


def draws(ranks: int) -> list[CompressedDraw]:
    """Pairs of what may interact."""
    pairs, share = CHANGES["2:4"], CHANGES["share"]
    if ranks == 2:
        return [
            on_layout(0, "llama", Topology(tp=2), pairs, sequence_parallel=True),
            on_layout(1, "gpt", Topology(dp=2), share, zero_stage=3),
            on_layout(4, "wide llama", Topology(tp=2), FEW_BITS["int4"], sequence_parallel=True, recompute="full"),
            on_layout(6, "wide llama", Topology(tp=2), FEW_BITS["int8"], sequence_parallel=True, tp_overlap_chunks=2),
            on_layout(7, "gpt", Topology(tp=2), FEW_BITS["binary"], tp_overlap_chunks=2),
        ]
    return [
        on_layout(2, "experts", Topology(tp=2, dp=2, ep=2), pairs, zero_stage=2),
        on_layout(5, "gpt", Topology(pp=2, dp=2), FEW_BITS["binary"], zero_stage=3),
        on_layout(3, "llama", Topology(pp=2, cp=2), share, zero_stage=1, pipeline_schedule="zb-h1"),
    ]


@pytest.mark.parametrize("count", [2, 4])
def test_a_layout_changes_nothing(ranks: RankPool, count: int) -> None:
    assert not failures(run_draws(ranks, draws(count)))


@pytest.mark.slow
def test_random_combinations(ranks: RankPool) -> None:
    assert not failures(run_draws(ranks, [draw(seed) for seed in range(24)]))
