"""Host lists, bandwidth formulas, and the order of a sweep."""

from __future__ import annotations

from math import log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_port.run.launchers import compress_hosts, expand_hosts
from megatron_port.tools.preflight.core import ALL_GATHER, ALL_REDUCE, POINT_TO_POINT, algbw_gb, busbw_gb
from megatron_port.tools.preflight.exchange import all_pairs_rounds, neighbour_rounds, rounds_for

HOST = st.from_regex(r"[a-z]{1,3}-?[0-9]{0,4}", fullmatch=True)
RUN = st.builds(
    lambda stem, first, count, width: [f"{stem}{n:0{width}d}" for n in range(first, first + count)],
    st.sampled_from(["n", "frontier", "nid0", "a1-"]), st.integers(0, 120), st.integers(1, 15), st.integers(1, 5),
)


@given(st.lists(st.one_of(RUN, st.lists(HOST, max_size=3)), max_size=5))
@settings(max_examples=200)
def test_compressed_hosts_expand_to_the_same(groups: list[list[str]]) -> None:
    hosts = [h for group in groups for h in group]
    assert expand_hosts(compress_hosts(hosts)) == hosts


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ([], ""),
        (["login"], "login"),
        (["frontier00001", "frontier00002", "frontier00003", "frontier00010"], "frontier[00001-00003,00010]"),
        (["n9", "n10", "n11"], "n[9-11]"),
        (["n09", "n10", "n99", "n100"], "n[09-10,99-100]"),
        (["n3", "n1", "n2"], "n[3,1-2]"),
        (["n1", "m1", "m2"], "n1,m[1-2]"),
        (["n7", "n7"], "n[7,7]"),
        (["n007", "n8"], "n[007,8]"),
    ],
)
def test_compressed_form(hosts: list[str], text: str) -> None:
    assert compress_hosts(hosts) == text


def test_bandwidths_are_those_of_nccl_tests() -> None:
    """Rows as all_reduce_perf, all_gather_perf and sendrecv_perf print them: size, time, algbw, busbw."""
    assert algbw_gb(1 << 30, 2e-3) == pytest.approx(536.87, abs=0.005)
    assert busbw_gb(ALL_REDUCE, 1 << 30, 2e-3, 8) == pytest.approx(536.87 * 1.75, abs=0.01)
    assert busbw_gb(ALL_GATHER, 1 << 30, 2e-3, 8) == pytest.approx(536.87 * 0.875, abs=0.01)
    assert busbw_gb(POINT_TO_POINT, 1 << 30, 2e-3, 8) == algbw_gb(1 << 30, 2e-3)
    assert busbw_gb(ALL_REDUCE, 4096, 1e-6, 1) == 0.0
    assert busbw_gb(ALL_REDUCE, 4096, 1e-6, 2) == algbw_gb(4096, 1e-6)


@pytest.mark.parametrize("n", range(2, 40))
def test_all_pairs_meet_once_in_perfect_rounds(n: int) -> None:
    rounds = all_pairs_rounds(n)
    assert len(rounds) == (n - 1 if n % 2 == 0 else n)
    for pairs in rounds:
        members = [m for p in pairs for m in p]
        assert len(members) == len(set(members)) == n - n % 2
    met = [p for pairs in rounds for p in pairs]
    assert sorted(met) == [(a, b) for a in range(n) for b in range(a + 1, n)]


@pytest.mark.parametrize("n", [*range(17, 70), 384, 1000, 3072, 9408])
def test_large_sweeps_take_logarithmic_rounds(n: int) -> None:
    rounds = rounds_for(n)
    assert rounds == neighbour_rounds(n) and len(rounds) <= 2 * log2(n)
    partners = [0] * n
    seen = set()
    for pairs in rounds:
        members = [m for p in pairs for m in p]
        assert len(members) == len(set(members)) >= 0.6 * n
        assert not seen & set(pairs) and all(0 <= a < b < n for a, b in pairs)
        seen.update(pairs)
        for m in members:
            partners[m] += 1
    assert min(partners) >= int(log2(n)) - 1
