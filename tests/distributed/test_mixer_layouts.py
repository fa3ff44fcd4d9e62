"""Mixers with a state, alone and beside attention, on random layouts, against one process."""

from __future__ import annotations

import pytest
from fuzz import failures, run_draws
from mixers import draw
from pool import RankPool

SEEDS = (2, 40, 43, 44, 70, 97, 102, 112)
"""A cheap set that covers what the last test asks; 300 are a record (benchmarks/evidence/mixers.md)."""


BESIDE = (1002, 1003, 1011, 1018, 1026)
"""Of attention and Mamba-2 beside one another."""


@pytest.mark.parametrize("seed", SEEDS + BESIDE)
def test_mixers_train_as_on_one_process(ranks: RankPool, seed: int) -> None:
    results = run_draws(ranks, [draw(seed)], patience=90.0)
    assert len(results) == 1 and not failures(results), failures(results)


def test_the_draws_of_attention_beside_a_recurrence_cover_what_they_should() -> None:
    draws = [draw(s) for s in BESIDE]
    layouts = [d.config.layout for d in draws]
    assert {2, 4} <= {d.topology.tp for d in draws} and any(d.topology.pp > 1 for d in draws)
    assert {"zigzag", "balanced"} <= {layout.cp_order for layout in layouts if layout.context_parallel_size > 1}
    assert any(d.config.data.attention_documents == "within" for d in draws if d.topology.cp > 1)
    assert any(layout.sequence_parallel for layout in layouts)
    assert any(d.config.model.recurrent.multipliers for d in draws)


def test_the_draws_cover_what_they_should() -> None:
    draws = [draw(s) for s in SEEDS]
    layouts, topologies = [d.config.layout for d in draws], [d.topology for d in draws]
    assert {t.tp > 1 for t in topologies} == {t.pp > 1 for t in topologies} == {t.cp > 1 for t in topologies}
    assert {layout.zero_stage for layout in layouts} == {0, 1, 2, 3}
    divided = [layout for layout in layouts if layout.context_parallel_size > 1]
    assert {layout.cp_order for layout in divided} == {"contiguous", "zigzag", "balanced"}
    assert {d.config.data.attention_documents for d in draws if d.topology.cp > 1} == {"across", "within"}
    assert any(layout.sequence_parallel and t.tp > 1 for layout, t in zip(layouts, topologies))
    assert {"none", "full"} <= {d.config.activations.policy for d in draws}
    recurrent = [d.config.model.recurrent for d in draws]
    assert any(r.heads > r.key_heads for r in recurrent) and {r.kernel for r in recurrent} == {1, 2, 4}
    assert any(r.chunk < d.config.model.seq_length // d.topology.cp for r, d in zip(recurrent, draws))
    assert any(  # B and C that ranks share, and a norm over all of them
        "mamba2" in d.config.model.mixers and d.config.model.recurrent.key_heads == 1 and d.topology.tp > 1
        and d.config.model.recurrent.kernel > 1 and d.config.model.recurrent.gated_norm != "none" for d in draws
    )
    assert any(len(d.config.model.mixers) > 1 for d in draws) and any(d.config.model.mtp_layers for d in draws)
