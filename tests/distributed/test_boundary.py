"""Several tensors between stages: a second one with a gradient, and one of integers without."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from pool import RankFailed, RankPool
from torch import nn

from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.dist.process import ProgressTracker
from megatron_port.core.engine.native_passes import BackwardTarget, PassWorker, Stages, StepWork
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.linear import WgradAccumulator
from megatron_port.core.layers.step import StepSlot
from megatron_port.core.pipeline.runner import Boundary, ScheduleRunner, StageLink
from megatron_port.core.pipeline.schedules import make_schedule

WIDTH, SEQ, MICRO_BATCHES = 6, 5, 4
BOUNDARY = Boundary.of({
    "hidden": ((1, SEQ, WIDTH), torch.float64), "ids": ((1, SEQ), torch.int64), "skip": ((1, SEQ, 3), torch.float64),
})


class Part(nn.Module):
    """A part of a model whose parts hand on a hidden state, the token ids and a narrow sum beside it."""

    table: nn.Parameter
    wide: nn.Parameter
    narrow: nn.Parameter

    def __init__(self, number: int, parts: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(number)
        self.first, self.last = number == 0, number == parts - 1
        shapes = {"table": (11, WIDTH), "wide": (WIDTH, WIDTH), "narrow": (WIDTH, 3)}
        for name, shape in shapes.items():
            value = torch.randn(shape, generator=draw, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        ids = inputs[0] if self.first else inputs[1]
        hidden = self.table[ids] if self.first else inputs[0] + self.table[ids]
        skip = hidden @ self.narrow + (0.0 if self.first else inputs[2])
        hidden = (hidden @ self.wide).tanh()
        return hidden.sum(-1) * skip.square().sum(-1) if self.last else (hidden, ids, skip)

    def loss_sum(self, logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return (logits * labels).sum()


def _batches() -> list[MicroBatch]:
    tokens = torch.randint(0, 11, (MICRO_BATCHES, 1, SEQ), generator=torch.Generator().manual_seed(3))
    return [MicroBatch((i,), tokens=t, labels=t + 1) for i, t in enumerate(tokens)]


def _step(schedule: str, chunks: int, boundary: Boundary = BOUNDARY) -> dict[str, torch.Tensor]:
    """Gradients of this rank's chunks by part and name; the function that ranks are sent."""
    topology = Topology(pp=2, vp=chunks, folded=schedule == "zb-v")
    ctx = ParallelContext.create(topology, "cpu")
    numbers = [topology.virtual_stage(ctx.coords.pp, c) for c in range(chunks)]
    mine, progress = [Part(n, 2 * chunks) for n in numbers], ProgressTracker()
    unused = WgradAccumulator(lambda p: None, lambda p: p)  # autograd keeps the gradients of these parts
    passes = PassWorker(
        Stages(mine, ctx, StepSlot(DropoutStream(0, ctx.device)), progress),
        StepWork(micro_batches=_batches(), step=0), BackwardTarget(unused, torch.tensor(0.5)),
    )
    try:
        ScheduleRunner(StageLink(ctx), progress).run(
            make_schedule(schedule, 2, MICRO_BATCHES, chunks), passes, lambda m: boundary
        )
    finally:
        ctx.close()
    return _gradients(zip(numbers, mine))


def _gradients(parts: Iterable[tuple[int, Part]]) -> dict[str, torch.Tensor]:
    found = {f"{n}.{name}": p.grad for n, part in parts for name, p in part.named_parameters()}
    return {name: gradient for name, gradient in found.items() if gradient is not None}


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("1f1b", 2), ("zb-v", 2)])
def test_gradients_through_three_tensors_are_those_of_one_process(
    ranks: RankPool, schedule: str, chunks: int
) -> None:
    parts, batches = [Part(n, 2 * chunks) for n in range(2 * chunks)], _batches()
    for batch in batches:
        state: tuple[torch.Tensor, ...] = (batch.tokens,)  # type: ignore[assignment]
        for part in parts[:-1]:
            state = part(*state)
        (0.5 * parts[-1].loss_sum(parts[-1](*state), batch.labels, None)).backward()  # type: ignore[arg-type]
    want = _gradients(enumerate(parts))
    assert len(want) == 3 * len(parts)
    found: dict[str, torch.Tensor] = {}
    for rank in ranks.run(2, _step, schedule, chunks):
        found.update(rank)
    assert set(found) == set(want)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, want[name], rtol=1e-13, atol=1e-13, msg=name)
        assert bool(gradient.any()), name


def test_a_stage_that_makes_something_else_is_named(ranks: RankPool) -> None:
    """Before it is sent: the other end has made buffers of other sizes."""
    wrong = Boundary.of({"hidden": ((1, SEQ, WIDTH), torch.float64), "skip": ((1, SEQ, 3), torch.float32)})
    with pytest.raises(RankFailed, match=r"a stage made \[1, 5, 6\] float64, \[1, 5\] int64, \[1, 5, 3\] float64, and "
                                         r"the next one expects hidden \[1, 5, 6\] float64, skip \[1, 5, 3\] float32"):
        ranks.run(2, _step, "1f1b", 1, wrong)
