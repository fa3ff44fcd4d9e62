"""Forty seeded random combinations against one process; a thousand were run once (docs/parity.md)."""

from __future__ import annotations

import pytest
from fuzz import draw, failures, run_draws
from pool import RankPool

SEEDS = (*range(40), 50)
"""50: rounding of tensor parallelism's partial sums showed in it that the reorderings were cut in too few places."""


@pytest.mark.parametrize("part", range(2))
def test_random_layouts_equal_one_process(ranks: RankPool, part: int) -> None:
    results = run_draws(ranks, [draw(s) for s in SEEDS[part::2]])
    assert not failures(results), failures(results)
    assert len(results) == len(SEEDS[part::2])


def test_the_draws_cover_what_they_should() -> None:
    draws = [draw(s) for s in SEEDS]
    assert {d.config.engine for d in draws} == {"native", "deepspeed"}
    assert {d.config.precision.dtype for d in draws} == {"fp64", "fp32", "bf16", "fp16"}
    assert any(8 // (d.config.batch.micro_batch_size * d.topology.dp) < d.topology.pp for d in draws)
    assert any(d.config.model.num_layers % d.topology.pp for d in draws)
    assert any(d.config.model.vocab_size % d.topology.tp for d in draws)
    assert any(d.config.model.kv_heads < d.config.model.num_attention_heads for d in draws)
    assert {d.config.layout.recompute for d in draws} == {"none", "selective", "full"}
    assert {d.config.model.tie_embeddings for d in draws} == {True, False}
    native = [d.config.layout for d in draws if d.config.engine == "native" and d.topology.pp > 1]
    assert {layout.pipeline_schedule for layout in native} == {"gpipe", "1f1b", "zb-h1", "zb-v"}
    assert any(layout.pipeline_schedule == "1f1b" and layout.virtual_pipeline_size > 1 for layout in native)
    assert {d.config.layout.zero_stage for d in draws if d.config.engine == "native" and d.topology.dp > 1} == {0, 1, 2}
    assert any(d.config.layout.sequence_parallel and d.topology.tp > 1 for d in draws)
