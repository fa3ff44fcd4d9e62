"""Shared by the fault tests: a server that commands are forked from, and the pool of ranks of tests/distributed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from commands import Commands
from pool import RankPool


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """``commands.start("train", …)`` forks a ``megatron-port`` command from a process that has imported torch."""
    with Commands(tmp_path_factory.mktemp("commands")) as server:
        yield server


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """``ranks.run(world_size, fn, *args, timeout=240, fresh=False, deepspeed=False)`` → results by rank."""
    pool = RankPool()
    yield pool
    pool.close()
