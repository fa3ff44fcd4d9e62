"""Swapped and partitioned activations on real ranks; all layouts and policies: ``activation_matrix.py``."""

from __future__ import annotations

from activation_matrix import LAYOUTS, compare, policies, run_of, swapped, topology_of
from pool import RankPool


def test_every_choice_is_equal_to_the_bit_and_nothing_races(ranks: RankPool) -> None:
    """Two stages of two tensor-parallel ranks; micro-batches wait on the host meanwhile."""
    layout, chosen = LAYOUTS["tp2 pp2"], policies()
    config, topology = run_of(layout, "bf16", "on"), topology_of(layout)
    names = ["swap", "partition", "mixture 0", "mixture 1"]
    for found in ranks.run(4, compare, config, [chosen[name] for name in names], topology, True, timeout=240.0):
        assert dict(zip(names, found)) == dict.fromkeys(names, True)


def test_buffers_are_made_once(ranks: RankPool) -> None:
    layout = LAYOUTS["pp2"]
    found = ranks.run(2, swapped, run_of(layout, "fp32", "off"), policies()["swap"], topology_of(layout), timeout=120.0)
    for (moved, made), *later in found:
        assert [bytes_ for bytes_, _ in later] == [2 * moved, 3 * moved]
        assert {buffers for _, buffers in later} == {made}
    # Of four micro-batches the first of two stages holds two at a time, the second one.
    assert found[0][0][1] == found[0][0][0] / 2
    assert found[1][0][1] == found[1][0][0] / 4
