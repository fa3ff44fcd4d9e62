"""Every communicator is made at the start, in one order: on NCCL another order of first uses is a deadlock."""

from __future__ import annotations

import time
from typing import Any

import cases
import pytest
import torch
import torch.distributed as dist
from lazy_communicators import emulate
from pool import RankFailed, RankPool

from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.dist.process import ProgressTracker
from megatron_port.core.errors import EnvironmentFault
from megatron_port.run.build import build_engine

LIMIT_S = 60.0


def _steps(layout: dict[str, Any], evaluate_first: bool) -> tuple[list[float], list[str], list[str]]:
    """Two steps; losses, communicators made at the start, communicators made later."""
    state = emulate()
    layout = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1, **layout}
    config = cases.make_config(model={"num_layers": 4}, layout=layout, global_batch_size=8, micro_batch_size=1)
    topology = Topology(
        tp=config.layout.tensor_parallel_size, pp=config.layout.pipeline_parallel_size,
        dp=config.layout.data_parallel_size, vp=config.layout.virtual_pipeline_size,
        folded=config.layout.pipeline_schedule == "zb-v",
    )
    ctx = ParallelContext.create(topology, "cpu")
    at_start = list(state.made)
    engine = build_engine(config, ctx, cases.providers_of(config))
    batches = cases.make_batches(config, ctx)
    if evaluate_first:
        engine.eval_step(batches(0))
    losses = [engine.train_step(batches(step), step=step, lr=1e-3).loss for step in range(2)]
    return losses, at_start, state.made[len(at_start) :]


@pytest.mark.parametrize(("layout", "evaluate_first"), [
    ({"pipeline_parallel_size": 2}, False),
    ({"pipeline_parallel_size": 4}, True),
    ({"pipeline_parallel_size": 2, "virtual_pipeline_size": 2, "data_parallel_size": 2}, True),
    ({"pipeline_parallel_size": 2, "pipeline_schedule": "zb-v", "virtual_pipeline_size": 2,
      "tensor_parallel_size": 2}, False),
], ids=["1f1b-2", "1f1b-4-evaluates-first", "interleaved-dp2-evaluates-first", "zb-v-tp2"])
def test_a_pipeline_trains_whatever_opens_first(
    ranks: RankPool, layout: dict[str, Any], evaluate_first: bool
) -> None:
    """Native pipelines opened gradients' queue first on stage 0, activations' on the others, and hung on NCCL."""
    world = 1
    for axis in ("tensor", "pipeline", "data"):
        world *= layout.get(f"{axis}_parallel_size", 1)
    found = ranks.run(world, _steps, layout, evaluate_first, timeout=LIMIT_S, fresh=True)
    assert all(losses == found[0][0] for losses, _, _ in found)
    assert [late for _, _, late in found] == [[]] * world
    assert all(at_start for _, at_start, _ in found)


def _crossed() -> None:
    """Two ranks use two groups for the first time in opposite orders."""
    emulate()
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in groups if dist.get_rank() == 0 else reversed(groups):
        dist.all_reduce(torch.zeros(1), group=group)


def test_the_emulation_hangs_where_nccl_does(ranks: RankPool) -> None:
    with pytest.raises(RankFailed) as failed:
        ranks.run(2, _crossed, timeout=3.0, fresh=True)
    assert failed.value.error_type == "Timeout"


def _no_communicator(absent: int) -> str:
    """Rank ``absent`` never comes to its dp group."""
    if dist.get_rank() == absent:
        for members in ([0, 1], [2, 3], [0, 2], [1, 3], [0, 1, 2, 3]):  # as the others do; local
            dist.new_group(members)
        time.sleep(5.0)
        return "absent"
    progress = ProgressTracker()
    try:
        ParallelContext.create(Topology(tp=2, dp=2), "cpu", timeout_s=2.0, progress=progress)
    except EnvironmentFault as error:
        return f"{error} | {progress.doing()}"
    return "made"


def test_a_communicator_that_cannot_be_made_is_named(ranks: RankPool) -> None:
    said = ranks.run(4, _no_communicator, 3, timeout=LIMIT_S, fresh=True)
    assert said[3] == "absent"
    assert said[2].startswith("rank 2 (pp 0, dp 1, tp 0): communicator tp (ranks 2-3) could not be made: ")
    assert said[2].endswith("| start, communicator tp (ranks 2-3)")
    assert said[1].startswith("rank 1 (pp 0, dp 0, tp 1): communicator dp (ranks 1, 3) could not be made: ")
