"""What a stage sends is freed while the step runs: a step of many micro-batches holds no more than a step of a few."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import LR, make_batches, make_config, providers_of
from pool import RankPool
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.pipeline.runner import Payload, StageLink
from megatron_port.run.build import build_engine

MICRO_BATCHES = 24


def _most_payloads(config: RunConfig, stages: int) -> tuple[int, int, int]:
    """(sends, most payloads alive at a send in a training step, in an evaluation) of this rank."""
    layout = config.layout
    topology = Topology(pp=stages, vp=layout.virtual_pipeline_size, folded=layout.pipeline_schedule == "zb-v")
    ctx = ParallelContext.create(topology, "cpu")
    engine: Any = build_engine(config, ctx, providers_of(config))
    link, most = engine.forward_backward.runner.link, [0, 0]
    sent: list[StorageWeakRef] = []
    evaluating = False
    start = link.send

    def send(payload: Payload, to: int, *, downstream: bool = True) -> Any:
        handle = start(payload, to, downstream=downstream)
        sent.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in payload)
        most[evaluating] = max(most[evaluating], sum(not ref.expired() for ref in sent))
        return handle

    link.send = send
    try:
        batches = make_batches(config, ctx)(0)
        engine.train_step(batches, step=0, lr=LR)
        count = len(sent)
        assert all(ref.expired() for ref in sent)
        evaluating = True
        engine.eval_step(batches)
        return count, most[0], most[1]
    finally:
        ctx.close()


@pytest.mark.parametrize(("schedule", "chunks", "bound"), [("1f1b", 1, 3), ("1f1b", 2, 7), ("zb-h1", 1, 4)])
def test_a_step_of_many_micro_batches_holds_few_of_its_sends(
    ranks: RankPool, schedule: str, chunks: int, bound: int
) -> None:
    """A payload may be alive as what the backward pass needs, for the receiver, or because it was just made."""
    config = make_config(
        micro_batch_size=1, global_batch_size=MICRO_BATCHES, model={"num_layers": 4, "seq_length": 8},
        layout={"pipeline_schedule": schedule, "virtual_pipeline_size": chunks},
    )
    for sends, training, evaluation in ranks.run(2, _most_payloads, config, 2):
        assert sends >= MICRO_BATCHES
        assert training <= bound and evaluation <= 4, (training, evaluation)


class _Work:
    """A transfer under NCCL: it can be asked whether it has ended."""

    def __init__(self) -> None:
        self.done, self.waits = False, 0

    def is_completed(self) -> bool:
        return self.done

    def wait(self) -> None:
        assert self.done, "the host must not wait for a transfer under way"
        self.waits += 1


def test_sends_that_the_backend_reports_as_done_are_freed_at_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPipe's activations, say, of which nothing comes back for long."""
    context = ParallelContext(Topology(pp=2), 0, torch.device("cpu"), Topology(pp=2).coordinates(0))
    link, works = StageLink(context), [_Work() for _ in range(6)]
    link._batched = True
    waiting = iter(works)
    monkeypatch.setattr(dist, "P2POp", lambda *args: SimpleNamespace(args=args))
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda ops: [next(waiting)])
    alive = []
    for number in range(6):
        payload = torch.full((4,), float(number))
        alive.append(StorageWeakRef(payload.untyped_storage()))
        link.send((payload,), 1, downstream=number % 3 != 2)
        del payload
        if number == 3:
            works[0].done = works[2].done = works[3].done = True
    assert [ref.expired() for ref in alive] == [True, False, True, False, False, False]  # 3 ends behind 1: a queue
    for work in works:
        work.done = True
    link.drain()
    assert all(ref.expired() for ref in alive) and [w.waits for w in works] == [1] * 6
