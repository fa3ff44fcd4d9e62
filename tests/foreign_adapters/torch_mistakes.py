"""Mistakes with torch's own wrappers: DDP, FSDP2 and pipelining. One process makes none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from megatron_port.parity import Batch, World
from megatron_port.tools.foreign.adapters._gpt import loss_sum
from megatron_port.tools.foreign.adapters.ddp import Ddp
from megatron_port.tools.foreign.adapters.fsdp2 import Fsdp2
from megatron_port.tools.foreign.adapters.pipelining import Pipelining

DDP = {
    "module called": "is not averaged over dp",
    "no division by world": "1/2 (1 / the size of dp",
    "first shares": "leaves out samples 4-7",
    "no sync in the last": "not averaged over dp",
}
"""Name → words that the tool must say."""


class DdpMistakes(Ddp):
    layout: ClassVar[Mapping[str, Any]] = {**Ddp.layout, "mistake": ""}

    def step(self, state: Any, batch: Batch, world: World) -> float:
        mistake, (model, optimizer) = world["mistake"] if world.size > 1 else "", state
        if not mistake:
            return super().step(state, batch, world)
        optimizer.zero_grad()
        labels = (batch.labels != self.ignored).sum()
        mine = batch.share(0 if mistake == "first shares" else world.rank, world.size)
        model.require_backward_grad_sync = mistake != "no sync in the last"
        called = model.module if mistake == "module called" else model
        loss = loss_sum(called(mine.tokens), mine.labels) / labels
        if mistake != "no division by world":
            loss = loss * world.size
        loss.backward()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        return float(total) / (1 if mistake == "no division by world" else world.size)


FSDP = {
    "no division by world": "1/2 (1 / the size of shard",
    "own norm": "it is that of this rank's tensors alone",
    "own labels": "mean of means",
}


class FsdpMistakes(Fsdp2):
    layout: ClassVar[Mapping[str, Any]] = {**Fsdp2.layout, "mistake": ""}

    def step(self, state: Any, batch: Batch, world: World) -> float:
        mistake, (model, optimizer) = world["mistake"] if world.size > 1 else "", state
        if mistake not in ("no division by world", "own labels"):
            return super().step(state, batch, world)
        optimizer.zero_grad()
        mine = batch.share(world.rank, world.size)
        labels = ((mine if mistake == "own labels" else batch).labels != self.ignored).sum()
        loss = loss_sum(model(mine.tokens), mine.labels) / labels
        loss.backward()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        return float(total) / (world.size if mistake == "own labels" else 1)

    def norm(self, state: Any) -> float:
        squares = torch.zeros((), dtype=torch.float64)
        for p in state[0].parameters():
            squares += (p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad).double().square().sum()
        if type(self).norms_are_whole:
            torch.distributed.all_reduce(squares)
        return float(squares.sqrt())

    norms_are_whole: ClassVar[bool] = True

    def start(self, world: World) -> None:
        type(self).norms_are_whole = not (world.size > 1 and world["mistake"] == "own norm")
        super().start(world)


PIPELINING = {
    "scaled": "1/4 (1 / micro_batches",
    "mean of each": "mean of means",
    "layers swapped": "rank 0 runs layers.1",
}


class PipeliningMistakes(Pipelining):
    layout: ClassVar[Mapping[str, Any]] = {**Pipelining.layout, "mistake": ""}

    def build(self, world: World) -> Any:
        state = super().build(world)
        mistake = world["mistake"]
        if world.size > 1 and mistake:
            stage = state.stages[0]
            if mistake == "layers swapped" and world.rank == 0:
                forward = stage.layers["0"].forward
                stage.layers["0"].forward = stage.layers["1"].forward
                stage.layers["1"].forward = forward
            labels_of = (lambda labels: (labels != -100).sum() * world["micro_batches"]) \
                if mistake == "mean of each" else (lambda labels: 1)
            made: Any = PipelineStage(stage, world.rank, world.size, torch.device("cpu"))
            kind: Any = get_schedule_class("1F1B")
            total = 92 if mistake == "mean of each" else 1
            state.schedule = kind(
                made, n_microbatches=world["micro_batches"], scale_grads=mistake == "scaled",
                loss_fn=lambda logits, labels: loss_sum(logits, labels) * total / labels_of(labels),
            )
        return state
