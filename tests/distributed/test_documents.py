"""Documents within samples: alone or beside others, on one process or on any layout, a document is computed alike."""

from __future__ import annotations

import documents
import fuzz
import pytest
from pool import RankPool


@pytest.mark.parametrize("seeds", [(0, 16), (2, 12, 33), (7,)])
def test_a_document_beside_others_is_what_it_is_alone(ranks: RankPool, seeds: tuple[int, ...]) -> None:
    """On one process, on two and on eight, with both kinds of recompute, and positions reset on parts of a sequence.
    ``documents.py`` has a hundred of these in ``benchmarks/results/documents.jsonl``."""
    results = documents.run_draws(ranks, [documents.draw(seed) for seed in seeds])
    assert len(results) == len(seeds) and not fuzz.failures(results), fuzz.failures(results)
