"""Sequences divided by their documents' work train as one process does, in fp64: each micro-batch has an order of its
own, which every stage finds for itself. Multi-token prediction, whose tokens lie on other ranks, is there too."""

from __future__ import annotations

from typing import Any

import pytest
from cases import make_config
from drawing import Draw
from fuzz import failures, run_draws
from pool import RankPool

from megatron_port.core.dist.mesh import Topology

ROPE = {"position_embedding": "rope", "normalization": "rmsnorm", "activation": "swiglu", "add_bias": False}
CASES: list[tuple[Topology, dict[str, Any], dict[str, Any], bool]] = [
    (Topology(cp=2), {**ROPE, "mtp_layers": 3, "tie_embeddings": False, "sliding_window": 5,
                      "attention_pattern": ("window", "full")}, {"recompute": "full"}, True),
    (Topology(cp=2), {"hidden_dropout": 0.2, "attention_dropout": 0.1}, {"cp_order": "contiguous"}, True),
    (Topology(cp=4), {"hidden_dropout": 0.2, "attention_dropout": 0.1, "attention_sinks": True},
     {"zero_stage": 2, "recompute": "selective"}, False),
    (Topology(tp=2, cp=2), {"num_query_groups": 2, "hidden_dropout": 0.2}, {"sequence_parallel": True}, True),
    (Topology(pp=2, cp=2), {**ROPE, "mtp_layers": 1, "num_layers": 4, "hidden_dropout": 0.1},
     {"pipeline_schedule": "zb-v", "virtual_pipeline_size": 2}, True),
    (Topology(dp=2, cp=2), {**ROPE, "mtp_layers": 2}, {"zero_stage": 3, "cp_order": "zigzag"}, False),
]
"""Layout, model, the rest of the layout, and whether labels are masked: of some steps all."""


def draws(world: int) -> list[Draw]:
    out = []
    for t, model, layout, masked in CASES:
        config = make_config(
            dtype="fp64", model={"num_layers": 2, "seq_length": 32, **model}, mask_loss=masked,
            layout={
                "context_parallel_size": t.cp, "cp_order": "balanced", "pipeline_parallel_size": t.pp,
                "tensor_parallel_size": t.tp, "data_parallel_size": t.dp, **layout,
            },
            data={"attention_documents": "within", "position_reset": "position_embedding" not in model},
        )
        out.append(Draw(len(out), config, t))
    return [one for one in out if one.topology.world_size == world]


@pytest.mark.parametrize("world", [2, 4])
def test_every_division_of_documents_trains_as_one_process_does(ranks: RankPool, world: int) -> None:
    results = run_draws(ranks, draws(world))
    assert len(results) == (2 if world == 2 else 4) and not failures(results), failures(results)


def test_runs_that_differ_from_pass_to_pass_give_one_gradient_each(ranks: RankPool) -> None:
    """Own kernels, which fp64 has not: a call for each run of positions, and one gradient of the bias for all."""
    config = make_config(
        dtype="fp32", own_kernels="on", model={"num_layers": 2, "seq_length": 128, "hidden_dropout": 0.2},
        micro_batch_size=1, global_batch_size=16,
        layout={"context_parallel_size": 2, "cp_order": "balanced"},
        data={"attention_documents": "within", "position_reset": True},
    )
    results = run_draws(ranks, [Draw(0, config, Topology(cp=2))])
    assert len(results) == 1 and not failures(results), failures(results)
