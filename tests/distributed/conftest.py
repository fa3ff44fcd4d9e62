"""The pool of ranks, shared by all distributed tests of a session."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """``ranks.run(world_size, fn, *args, timeout=240, fresh=False, deepspeed=False)`` → results by rank."""
    pool = RankPool()
    yield pool
    pool.close()
