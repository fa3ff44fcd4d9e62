"""Attention within chunks trains on every layout as on one process: chunks that end in, on and beyond a rank's cut."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from cases import make_config
from drawing import Draw
from fuzz import failures, run_draws
from pool import RankPool

from megatron_port.core.dist.mesh import Topology

LLAMA: dict[str, Any] = {
    "num_layers": 2, "activation": "swiglu", "normalization": "rmsnorm", "position_embedding": "rope",
    "add_bias": False, "tie_embeddings": False, "num_query_groups": 2, "attention_pattern": ("chunk", "full"),
}


def draws(world: int) -> list[Draw]:
    """Divided sequences by each method and order with chunks of three sizes; then other layouts."""
    out: list[Draw] = []
    for number, (method, order) in enumerate(itertools.product(("gather", "heads", "ring"),
                                                               ("contiguous", "zigzag", "balanced"))):
        model = {**LLAMA, "attention_chunk": (3, 8, 5)[number % 3], "attention_sinks": number % 2 == 0}
        layout = {"context_parallel_size": world, "cp_method": method, "cp_order": order}
        out.append(Draw(len(out), make_config(dtype="fp64", model=model, layout=layout), Topology(cp=world)))
    for tp, pp, dp in itertools.product((1, 2), repeat=3):
        if tp * pp * dp == world:
            model = {**LLAMA, "attention_chunk": 5}
            config = make_config(dtype="fp64", model=model, layout={"sequence_parallel": tp > 1, "recompute": "full"})
            out.append(Draw(len(out), config, Topology(tp, pp, dp)))
    return out


@pytest.mark.parametrize("world", [2])
def test_chunks_train_as_on_one_process(ranks: RankPool, world: int) -> None:
    results = run_draws(ranks, draws(world))
    assert len(results) == len(draws(world)) and not failures(results), failures(results)
