"""What users set beside the optimizer's rule trains on every layout as on one process, to 1e-9 in fp64."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from cases import LR, make_config, run_cases, single_run
from pool import RankPool

from megatron_port.config.schema import RunConfig
from megatron_port.parallel.topology import Topology
from megatron_port.parity.comparison import FP64, Run, compare

STEPS = 4
MODEL = {"tie_embeddings": False, "vocab_size": 53}
LAYOUTS: tuple[tuple[Topology, dict[str, Any]], ...] = (
    (Topology(2, 2, 1), {"sequence_parallel": True, "vocab_padding_multiple": 8}),
    (Topology(2, 1, 2), {"zero_stage": 2}),
    (Topology(1, 1, 4), {"zero_stage": 3}),
)


def with_options(config: RunConfig) -> RunConfig:
    return dataclasses.replace(config, training=dataclasses.replace(config.training, z_loss=0.02))


@pytest.fixture(scope="module")
def alone() -> Run:
    return single_run(with_options(make_config(dtype="fp64", model=MODEL)), steps=STEPS)


def test_options_on_every_layout(ranks: RankPool, alone: Run) -> None:
    configs = [with_options(make_config(dtype="fp64", model=MODEL, layout=dict(layout))) for _, layout in LAYOUTS]
    cases = [(config, topology, STEPS, 1) for config, (topology, _) in zip(configs, LAYOUTS)]
    results = ranks.run(4, run_cases, cases)
    for number, config in enumerate(configs):
        deviations = compare(alone, Run.of([r[number] for r in results]), FP64, config.model, lr=LR)
        assert deviations and all(d.ok for d in deviations), "\n".join(str(d) for d in deviations if not d.ok)


def test_the_options_change_the_run(alone: Run) -> None:
    plain = single_run(make_config(dtype="fp64", model=MODEL), steps=1)
    assert abs(plain.losses[0] - alone.losses[0]) > 1e-2
