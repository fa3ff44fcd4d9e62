"""``torch.distributed.pipelining`` with a small GPT, a layer a stage or more, by several schedules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from megatron_port.tools.foreign.adapter import Adapter, Batch, World
from megatron_port.tools.foreign.adapters._gpt import LAYERS, Gpt, loss_sum

SEVERAL = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
"""Schedules with two stages a rank."""


@dataclass
class _State:
    stages: list[Gpt]
    schedule: Any
    optimizer: torch.optim.Optimizer


class Pipelining(Adapter):
    """Stages of a small GPT of four layers. The loss is a sum, so nothing is scaled; it is divided by the labels."""

    layout: ClassVar[Mapping[str, Any]] = {"schedule": "1F1B", "micro_batches": 1}
    model: ClassVar[Mapping[str, Any]] = {"fp64": True}
    space: ClassVar[Mapping[str, Any]] = {
        "schedule": ("GPipe", "1F1B", *SEVERAL), "micro_batches": (4, 8), "fp64": (True, False),
    }
    ignored = -100
    layers = 2 * LAYERS

    def legal(self, options: Mapping[str, Any], size: int) -> str:
        stages = size * (2 if options["schedule"] in SEVERAL else 1)
        if self.layers % stages:
            return f"{self.layers} layers are no {stages} equal stages"
        if options["micro_batches"] < size or options["micro_batches"] % size:
            return f"micro_batches {options['micro_batches']} is no multiple of {size} ranks"
        return ""

    def axes(self, world: World) -> Mapping[str, int]:
        return {"pp": world.size}

    def _stage(self, world: World, index: int, count: int) -> Gpt:
        model, size = Gpt(self.vocabulary, self.sequence, layers=self.layers), self.layers // count
        for name in list(model.layers):
            if not index * size <= int(name) < (index + 1) * size:
                del model.layers[name]
        if index:
            model.tokens = model.positions = None
        if index < count - 1:
            model.norm = model.head = None
        return model.to(torch.float64 if world["fp64"] else torch.float32)

    def build(self, world: World) -> _State:
        each = 2 if world["schedule"] in SEVERAL and world.size > 1 else 1
        places = [world.rank + i * world.size for i in range(each)]
        stages = [self._stage(world, place, each * world.size) for place in places]
        schedule = None
        if world.size > 1:
            made = [PipelineStage(stage, place, each * world.size, torch.device("cpu"))
                    for stage, place in zip(stages, places, strict=True)]
            kind: Any = get_schedule_class(world["schedule"])
            schedule = kind(made if each > 1 else made[0], n_microbatches=world["micro_batches"], loss_fn=loss_sum,
                            scale_grads=False)
        parameters = [p for stage in stages for p in stage.parameters()]
        return _State(stages, schedule, torch.optim.SGD(parameters, lr=0.1))

    def step(self, state: Any, batch: Batch, world: World) -> float | None:
        state.optimizer.zero_grad()
        labels = int((batch.labels != self.ignored).sum())
        losses: list[Any] = []
        if state.schedule is None:
            losses.append(loss_sum(state.stages[0](batch.tokens), batch.labels))
            losses[0].backward()
        else:
            inputs = (batch.tokens,) if world.rank == 0 else ()
            last = any(stage.head is not None for stage in state.stages)
            state.schedule.step(*inputs, target=batch.labels if last else None, losses=losses if last else None)
        for stage in state.stages:
            for parameter in stage.parameters():
                assert parameter.grad is not None
                parameter.grad.div_(labels)
        return float(sum(losses)) / labels if losses else None

    def update(self, state: Any) -> None:
        state.optimizer.step()

    def modules(self, state: Any) -> Iterable[tuple[str, nn.Module]]:
        for stage in state.stages:
            yield "", stage
