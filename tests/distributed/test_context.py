"""Divided sequences are equal to one process, and to a GPT on whole sequences, in the draws of ``context``."""

from __future__ import annotations

import itertools

import pytest
from context import DOCUMENTS, MASKS, METHODS, ORDERS, ContextDraw, draw, run_draws
from fuzz import failures
from pool import RankPool

SEEDS: dict[int, tuple[int, ...]] = {
    2: (98, 145, 184, 252, 427, 461), 3: (355,),
    4: (47, 79, 83, 88, 106, 146, 159, 217, 277, 283, 296, 418, 471, 501, 522, 533, 586),
}
"""Draws that between them have every pair that ``wanted`` asks for."""
REFUSED: set[str] = set()
"""What the draws of the first 300 seeds ask for and a configuration refuses, by its reason."""


def draws(world: int) -> list[ContextDraw]:
    found = [draw(seed) for seed in SEEDS[world]]
    assert all(one.topology.world_size == world and not one.refused for one in found)
    return found


@pytest.mark.parametrize("world", SEEDS)
def test_divided_sequences_equal_one_process(ranks: RankPool, world: int) -> None:
    results = run_draws(ranks, draws(world))
    assert results and not failures(results), failures(results)


def test_nothing_else_is_refused() -> None:
    assert {one.refused for one in map(draw, range(300))} - {""} == REFUSED


def met(one: ContextDraw) -> set[tuple[object, ...]]:
    """Return the pairs of options that a draw has."""
    layout, model, t, config = one.config.layout, one.config.model, one.topology, one.config
    method, order = layout.cp_method, layout.cp_order
    documents, mask, _ = config.name.split("-")
    sequence = layout.sequence_parallel
    found: set[tuple[object, ...]] = {
        (method, order), (method, "cp", t.cp), (order, "cp", t.cp), (method, "documents", documents),
        (order, "documents", documents), (method, "mask", mask), (order, "mask", mask),
        (method, "recompute", config.activations.policy), ("zero", layout.zero_stage), ("engine", config.engine),
        ("schedule", layout.pipeline_schedule, layout.virtual_pipeline_size > 1) if t.pp > 1 else (),
        (method, "pp", t.pp > 1), (method, "dp", t.dp > 1), (method, "plain", one.plain),
        (method, "tp", "sequence parallel" if sequence else "whole") if t.tp > 1 else (),
        (order, "tp", "sequence parallel" if sequence else "whole") if t.tp > 1 else (),
        ("shared heads",) if model.kv_heads < t.tp else (), ("latent",) if model.kv_lora_rank else (),
        (method, "offload") if config.offload.optimizer != "none" else (), (order, model.position_embedding),
    }
    for name, there in (
        ("window", model.sliding_window), ("softcap", model.attention_softcap), ("sinks", model.attention_sinks),
        ("attention dropout", model.attention_dropout), ("gate", model.attention_gate),
    ):
        found.add((method, name) if there else ())
    for name, there in (
        ("dropout", model.hidden_dropout), ("reset", config.data.position_reset), ("mtp", model.mtp_layers),
    ):
        found.add((order, name) if there else ())
    return found - {()}


def wanted() -> set[tuple[object, ...]]:
    """Return the pairs of options that the draws above must have."""
    names = ("window", "softcap", "sinks", "attention dropout", "gate")
    return {
        *itertools.product(METHODS, ORDERS), *itertools.product(METHODS, ["cp"], (2, 4)),
        *itertools.product(METHODS, ["documents"], DOCUMENTS), *itertools.product(ORDERS, ["documents"], DOCUMENTS),
        *itertools.product(METHODS, ["mask"], MASKS), *itertools.product(ORDERS, ["mask"], MASKS),
        *itertools.product(METHODS, ["recompute"], ("none", "selective", "full")),
        *itertools.product(METHODS, ("pp", "dp", "plain"), (True,)), *itertools.product(METHODS, names),
        *itertools.product(METHODS, ["tp"], ("sequence parallel", "whole")),
        *itertools.product(ORDERS, ("dropout", "reset", "mtp", "rope", "learned")),
        *itertools.product(["zero"], range(4)), ("shared heads",), ("latent",),
        *(("schedule", name, chunks) for name, chunks in (
            ("gpipe", False), ("1f1b", False), ("1f1b", True), ("zb-h1", False), ("zb-v", True)
        )),
    }


def test_the_draws_cover_what_they_should() -> None:
    seen: set[tuple[object, ...]] = set().union(*(met(one) for world in SEEDS for one in draws(world)))
    assert not (lacking := wanted() - seen), sorted(map(str, lacking))
