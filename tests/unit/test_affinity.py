"""Cores of forked ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_port.run.affinity import bind_near_device, near_cores, parse_cores, shares

NUMA = [frozenset(range(16 * n, 16 * (n + 1))) for n in range(4)]
"""Of a Frontier node, whose first core of each L3 region is the system's."""
FREE = frozenset(core for core in range(64) if core % 8)


def test_frontiers_dies_get_the_cores_that_olcf_names() -> None:
    """https://docs.olcf.ornl.gov/systems/frontier_user_guide.html#frontier-compute-nodes: GCD 0 is next to cores 48-55,
    1 to 56-63, 2 to 16-23, 3 to 24-31, 4 to 0-7, 5 to 8-15, 6 to 32-39 and 7 to 40-47."""
    found = shares([NUMA[n] for n in (3, 3, 1, 1, 0, 0, 2, 2)], FREE)
    first = [48, 56, 16, 24, 0, 8, 32, 40]
    assert found == [frozenset(range(start + 1, start + 8)) for start in first]


@given(st.lists(st.sampled_from([frozenset(), *NUMA]), min_size=1, max_size=9), st.sets(st.integers(0, 70), min_size=1))
def test_every_rank_has_cores_that_are_free_and_its_own_where_there_are_enough(
    near: list[frozenset[int]], free: set[int]
) -> None:
    found = shares(near, frozenset(free))
    for rank, cores in enumerate(found):
        wanted = near[rank] & free or free
        assert cores and cores <= wanted
        alike = [other for other in range(len(near)) if (near[other] & free or free) == wanted]
        if len(wanted) >= len(alike):
            assert all(not cores & found[other] for other in alike if other != rank)
            assert frozenset().union(*(found[other] for other in alike)) == wanted


def test_cores_of_a_device(tmp_path: Path) -> None:
    (tmp_path / "0000:c1:00.0").mkdir()
    (tmp_path / "0000:c1:00.0" / "local_cpulist").write_text("48-50,112\n")
    assert near_cores("GPU-1 at 0000:c1:00", tmp_path) == {48, 49, 50, 112}
    assert near_cores("GPU-1 at 0000:c2:00", tmp_path) == near_cores("GPU-1", tmp_path) == frozenset()
    assert parse_cores("") == frozenset() and parse_cores("3") == {3}


def gpus(count: int) -> Any:
    return SimpleNamespace(count=count, describe=lambda index: ("gpu", 1, ""))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_a_forked_rank_is_bound_and_another_is_not() -> None:
    code = (
        "import os, sys\nfrom types import SimpleNamespace as N\n"
        "from megatron_port.run.affinity import bind_near_device\n"
        "info = N(launcher=sys.argv[1], local_rank=1, local_world_size=2, rank=9, hostname='h')\n"
        "for _ in '12': said = bind_near_device(info, N(count=2, describe=lambda index: ('gpu', 1, '')))\n"
        "print(said, sorted(os.sched_getaffinity(0)))"
    )
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core")
    half = cores[len(cores) // 2:]
    for launcher, expected in (("agent", half), ("slurm", cores)):
        done = subprocess.run([sys.executable, "-c", code, launcher], capture_output=True, text=True, check=True)
        assert done.stdout.strip().endswith(str(expected)), done.stdout
        assert done.stdout.startswith("rank 9 runs on cores ") == (launcher == "agent")
    assert bind_near_device(SimpleNamespace(launcher="agent"), gpus(0)) == ""  # type: ignore[arg-type]


def test_a_rank_that_starts_again_divides_the_nodes_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not its own share of them, which is all that it has by then."""
    mine = set(range(8))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)) if pid else set(mine), raising=False)

    def take(pid: int, cores: frozenset[int]) -> None:
        mine.intersection_update(cores)

    monkeypatch.setattr(os, "sched_setaffinity", take, raising=False)
    info: Any = SimpleNamespace(launcher="agent", local_rank=1, local_world_size=2, rank=9, hostname="h")
    for _ in "12":
        assert bind_near_device(info, gpus(2)) == "rank 9 runs on cores 4-7 of h"
    assert mine == {4, 5, 6, 7}
