"""Who is to blame, from simulated rates of pairs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_port.core.config.schema import PreflightConfig
from megatron_port.tools.preflight.exchange import Pair, identify, rounds_for, sacrifice, suspects
from megatron_port.tools.preflight.network import blame_lanes


def rates(
    n: int, slow_nodes: set[int], slow_links: set[Pair], *, seed: int = 0, spread: float = 0.1
) -> dict[Pair, float]:
    """What a sweep over ``n`` nodes would measure: 20 GB/s give or take ``spread``, a tenth of it where it is slow."""
    draw = random.Random(seed)
    out = {}
    for pair in (p for r in rounds_for(n) for p in r):
        bad = pair in slow_links or slow_nodes & set(pair)
        out[pair] = draw.uniform(1 - spread, 1) * (2.0 if bad else 20.0)
    return out


@pytest.mark.parametrize("n", [3, 4, 5, 8, 16, 17, 40, 384])
def test_a_slow_node_is_named_and_no_other(n: int) -> None:
    for node in {0, 1, n // 2, n - 1}:
        found = identify(rates(n, {node}, set()), share=0.8)
        assert set(found.nodes) == {node} and not found.links
        measured, expected = found.nodes[node]
        assert 1.8 <= measured <= 2.0 and 14.0 < expected <= 16.0


@pytest.mark.parametrize("n", [3, 4, 8, 16, 40, 384])
def test_a_slow_link_is_named_and_no_node(n: int) -> None:
    for link in rounds_for(n)[0][:2]:
        found = identify(rates(n, set(), {link}), share=0.8)
        assert set(found.links) == {link} and not found.nodes


@given(st.integers(6, 60), st.data())
@settings(max_examples=60, deadline=None)
def test_several_culprits_are_told_apart(n: int, data: st.DataObject) -> None:
    nodes = data.draw(st.sets(st.integers(0, n - 1), max_size=max(1, n // 6)))
    whole = [p for r in rounds_for(n) for p in r if not nodes & set(p)]
    chosen = data.draw(st.lists(st.sampled_from(whole), max_size=2, unique=True))
    if len(chosen) == 2 and set(chosen[0]) & set(chosen[1]):
        chosen = chosen[:1]  # two links of one node may well be that node's fault
    found = identify(rates(n, nodes, set(chosen)), share=0.8)
    assert set(found.nodes) == nodes and set(found.links) == set(chosen)


@given(st.integers(2, 40), st.integers(0, 10**6), st.floats(0.0, 0.19))
@settings(max_examples=60, deadline=None)
def test_a_healthy_network_is_never_blamed(n: int, seed: int, spread: float) -> None:
    assert not identify(rates(n, set(), set(), seed=seed, spread=spread), share=0.8)


def test_a_node_with_most_of_its_links_slow_is_the_culprit_itself() -> None:
    found = identify(rates(8, set(), {(0, 3), (1, 3), (2, 3), (3, 4), (3, 5)}), share=0.8)
    assert set(found.nodes) == {3} and not found.links


def test_two_nodes_have_one_link_which_only_a_threshold_can_judge() -> None:
    assert not identify({(0, 1): 2.0}, share=0.8)
    assert set(identify({(0, 1): 2.0}, share=0.8, floor=10.0).links) == {(0, 1)}


def test_suspects_are_few() -> None:
    found = rates(384, {7, 200}, {(0, 1)})
    culprits = identify(found, share=0.8)
    again = suspects(found, culprits)
    assert len(again) == 5 and (0, 1) in again and sum(7 in p for p in again) == 2
    assert len(suspects(found, culprits, most=3)) == 3
    # What was measured again and is far below needs no third look; what has not been, or is near, does.
    assert suspects(found, culprits, seen=again, clear=0.5) == []
    assert suspects(found, culprits, seen=again[1:], clear=0.5) == again[:1]
    assert suspects(found, culprits, seen=again, clear=0.1) == again


def test_one_node_of_a_slow_link_is_left_out() -> None:
    # Node 2 is the common end of both links; of two equals the one whose other pairs are slower goes.
    found = rates(6, set(), {(0, 2), (2, 5)}, spread=0.0)
    assert set(sacrifice({(0, 2), (2, 5)}, found)) == {2}
    found = {**rates(4, set(), {(0, 1)}, spread=0.0), (0, 2): 17.0, (0, 3): 17.0}
    assert sacrifice({(0, 1)}, found) == {0: (0, 1)}
    assert sacrifice(set(), found) == {}


def test_one_lane_alone_is_seen_where_the_total_hides_it() -> None:
    lanes = [rates(6, set(), set(), spread=0.0) for _ in range(8)]
    lanes[5] = {p: r / (4 if 3 in p else 1) for p, r in lanes[5].items()}
    found = blame_lanes(lanes, PreflightConfig(share_of_median=0.8))
    assert [(lane, set(c.nodes)) for lane, c in found] == [(5, {3})]
    found = blame_lanes(lanes, PreflightConfig(share_of_median=0.8, link_gb=160.0))
    assert found[0][0] is None and set(found[0][1].nodes) == {3}
    # The ranks of a CPU run share one interface: half the rate of one of them, beside a whole one, is no finding.
    assert blame_lanes(lanes, PreflightConfig(share_of_median=0.8), own_adapters=False) == []
