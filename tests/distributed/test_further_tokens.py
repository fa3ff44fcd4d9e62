"""Multi-token prediction split over ranks is that of one process: every kind of division of its modules, its third copy
of the token table, and its counts, in fp64. On one process plain torch proves it (tests/unit/test_multi_token.py)."""

from __future__ import annotations

from typing import Any

import pytest
from cases import make_config
from drawing import Draw
from fuzz import failures, run_draws
from pool import RankPool

from megatron_port.core.dist.mesh import Topology

LLAMA = {"position_embedding": "rope", "normalization": "rmsnorm", "activation": "swiglu", "add_bias": False,
         "num_query_groups": 2, "mtp_weight": 0.7}
CASES: list[tuple[tuple[int, int, int], bool, bool, dict[str, Any]]] = [
    ((2, 1, 1), False, True, {"sequence_parallel": True}),
    ((1, 2, 1), False, False, {"pipeline_schedule": "1f1b"}),
    ((1, 2, 1), True, True, {"pipeline_schedule": "1f1b"}),
    ((1, 1, 2), False, True, {"zero_stage": 2, "reduce_bucket_size": 4000}),
    ((2, 2, 1), True, True, {"pipeline_schedule": "zb-h1"}),
    ((1, 2, 2), False, True, {"pipeline_schedule": "zb-v", "virtual_pipeline_size": 2, "zero_stage": 3}),
]
"""(tp, pp, dp), tied, with masked labels of several documents, and the rest: the embedding and the head are on one
rank, on two, and on one that is both ends."""


def draws(world: int) -> list[Draw]:
    """Three depths where the tables are not tied, else one."""
    out = []
    for (tp, pp, dp), tied, masked, layout in CASES:
        config = make_config(
            dtype="fp64", micro_batch_size=1 + (pp == 1), mask_loss=masked,
            layout={"recompute": "full" if tied else "none", **layout},
            model={**LLAMA, "tie_embeddings": tied, "mtp_layers": 1 if tied else 3, "hidden_dropout": 0.1,
                   "num_layers": pp * layout.get("virtual_pipeline_size", 1)},
            data={"attention_documents": "within"} if masked else None,
        )
        out.append(Draw(len(out), config, Topology(tp, pp, dp)))
    return [one for one in out if one.topology.world_size == world]


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_every_layout_predicts_further_tokens_as_one_process_does(ranks: RankPool, world: int) -> None:
    results = run_draws(ranks, draws(world))
    assert len(results) == (4 if world == 2 else 2) and not failures(results), failures(results)
