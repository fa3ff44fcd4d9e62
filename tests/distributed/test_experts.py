"""Layers of experts are equal to one process, token by token, in the draws of ``experts``."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from cases import REORDERINGS
from experts import PRESETS, ExpertDraw, _single, draw, run_draws
from fuzz import failures
from pool import RankPool
from undecided import Follower, undecided

from megatron_port.tools.parity.comparison import Deviation

SEEDS = {
    "2": (9, 25, 46, 56, 58, 70, 100, 172, 242, 348, 407, 456, 679),
    "4": (7, 10, 114, 238, 312),
    "2, divided": (1012, 1013, 1104),
    "4, divided": (1000, 1006, 1021, 1024, 1051, 1064, 1113),
}
"""Draws that between them have every pair of preset, ZeRO stage, schedule, recompute and ep that draws without cp have,
and every option; by the number of ranks, and whether those divide sequences."""
FP32 = 25
"""A small one in fp32, each token of which goes to one expert."""


def draws(case: str) -> list[ExpertDraw]:
    found = [draw(seed) for seed in SEEDS[case]]
    assert all(one.topology.world_size == int(case[0]) for one in found)
    assert all((one.topology.cp > 1) == case.endswith("divided") for one in found)
    return found


@pytest.mark.parametrize("case", [
    case if case in ("2", "4, divided") else pytest.param(case, marks=pytest.mark.slow) for case in SEEDS
])
def test_experts_equal_one_process(ranks: RankPool, case: str) -> None:
    results = run_draws(ranks, draws(case))
    assert not failures(results), failures(results)


def met(one: ExpertDraw) -> set[tuple[str, object]]:
    """Return what a draw shows."""
    layout, moe, t = one.config.layout, one.config.model.moe, one.topology
    return {
        ("preset", one.preset), ("engine", one.config.engine), ("zero", layout.zero_stage), ("ep", min(t.ep, 4)),
        ("schedule", (layout.pipeline_schedule, layout.virtual_pipeline_size > 1)),
        ("recompute", one.config.activations.policy), ("offload", one.config.offload.optimizer != "none"),
        ("ep over tp", t.ep > 1 and t.tp > 1), ("ep over a part of tp", 1 < t.ep < t.tp), ("ep over dp", t.ep > t.tp),
        ("ep over a part of dp", t.tp < t.ep < t.tp * t.dp),
        ("sequence parallel", layout.sequence_parallel and t.tp > 1),
        ("tp without it", t.tp > 1 and not layout.sequence_parallel),
        ("drop", moe.drop_by if moe.capacity_factor else ""), ("hybrid", 0 < t.shard < t.dp),
        *({("order", layout.cp_order), ("ep over cp", t.ep > t.tp),
           ("divided, dropped by", moe.drop_by if moe.capacity_factor else "")} if t.cp > 1 else ()),
    }


def test_the_draws_cover_what_they_should() -> None:
    seen: set[tuple[str, object]] = set().union(*(met(one) for case in SEEDS for one in draws(case)))
    wanted: dict[str, Sequence[object]] = {
        "preset": list(PRESETS), "engine": ("native", "deepspeed"), "zero": range(4), "ep": (1, 2, 4),
        "schedule": [(name, vp) for name, vp in (
            ("gpipe", False), ("1f1b", False), ("1f1b", True), ("zb-h1", False), ("zb-v", True)
        )],
        "recompute": ("none", "selective", "full"), "drop": ("", "position", "probability"),
        "order": ("contiguous", "zigzag"), "divided, dropped by": ("", "position", "probability"),
        **dict.fromkeys(("offload", "ep over tp", "ep over a part of tp", "ep over dp", "ep over a part of dp",
                         "sequence parallel", "tp without it", "hybrid", "ep over cp"), (True,)),
    }
    lacking = [(name, value) for name, values in wanted.items() for value in values if (name, value) not in seen]
    assert not lacking, lacking


def test_a_route_that_rounding_does_not_explain_is_found() -> None:
    """One token sent elsewhere, one copy dropped: by a process that follows these routes and scores for itself."""
    one = draw(FP32)
    routes = sorted(_single(one, 1).routes)
    step, layer, sample, position, (chosen,) = routes[0]
    other = (chosen + 1) % one.config.model.moe.num_experts

    def follow(first: int) -> list[Deviation]:
        followers = [Follower([(step, layer, sample, position, (first,)), *routes[1:]]) for _ in REORDERINGS[3:5]]
        for order, follower in zip((None, REORDERINGS[4]), followers, strict=True):
            _single(one, 1, order, follower)
        assert [flip[1:] for flip in followers[0].flipped] == ([({chosen}, {other})] if first == other else [])
        return undecided(followers[0], followers[1:])

    assert [d.ok for d in follow(chosen)] == [True, True, True]
    assert not follow(other)[1].ok
    assert [d.ok for d in follow(-1 - chosen)] == [True, True, False]
