"""Routes in half precision: which of them rounding may change, and that a layout which follows others' differs by no
more than rounding (``routes``, which runs as many draws as one likes)."""

from __future__ import annotations

import fuzz
import pytest
import routes
from pool import RankPool

SEEDS = [27, pytest.param(48, marks=pytest.mark.slow)]
"""bf16; tp 3 with ep 3, tp 2 with two stages: draws of which some tokens' routes are decided by rounding."""


@pytest.mark.parametrize("seed", SEEDS)
def test_half_precision_follows_routes(ranks: RankPool, seed: int) -> None:
    ((one, deviations),) = results = routes.run_draws(ranks, [routes.draw(seed)])
    assert not fuzz.failures(results), fuzz.failures(results)
    flipped = [d for d in deviations if d.quantity == "flipped"]
    assert len(flipped) == 2 and all(d.value > 0 for d in flipped), f"seed {one.seed}: nothing was decided by rounding"
