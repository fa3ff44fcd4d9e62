"""A loop whose ranks divide the positions of samples, and mistakes in how it counts their labels.

Each rank runs whole samples and takes the losses of its own positions, so gradients add up over ranks as under context
parallelism. One process makes no mistake.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_port.parity import Adapter, Batch, World
from megatron_port.tools.foreign.adapters._gpt import Gpt, loss_sum

MISTAKES = {
    "own labels": "is a mean of means: each cp rank divides by its own number of labels (rank 0 of cp {0}; rank 1 of "
                  "cp {1})",
    "own labels of micro-batches": "divides by its own number of labels, 2 samples at a time (rank 0 of cp {0};",
    "own labels, summed": "is 2 (the size of cp) times a mean of means: each cp rank divides by",
    "not summed": "is not summed over cp",
}
HELD = {"neighbours": ("0-7", "8-15"), "balanced": ("0-3, 12-15", "4-11")}
"""Positions of each of two ranks."""


class Context(Adapter):
    """The loop. ``way``: which positions a rank has."""

    layout: ClassVar[Mapping[str, Any]] = {"cp": 1, "way": "balanced", "mistake": ""}
    ignored = -100

    def axes(self, world: World) -> Mapping[str, int]:
        return {"dp": world.size // world["cp"], "cp": world["cp"]}

    def build(self, world: World) -> Any:
        model = Gpt(self.vocabulary, self.sequence).double()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def own(self, batch: Batch, world: World) -> Tensor:
        """Labels of this rank's positions; the others are left out."""
        place, count, labels = world.rank % world["cp"], world["cp"], batch.labels.clone()
        size = labels.shape[1] // (2 * count)
        mine = [2 * place, 2 * place + 1] if world["way"] == "neighbours" else [place, 2 * count - 1 - place]
        for block in set(range(2 * count)) - set(mine):
            labels[:, block * size : (block + 1) * size] = self.ignored
        return labels

    def step(self, state: Any, batch: Batch, world: World) -> float:
        model, optimizer = state
        optimizer.zero_grad()
        replicas, mistake, total = world.size // world["cp"], world["mistake"], torch.zeros((), dtype=torch.float64)
        mine = batch.share(world.rank // world["cp"], replicas)
        parts = len(mine) // 2 if "micro-batches" in mistake else 1
        for index in range(parts):
            micro = mine.share(index, parts)
            labels, count = self.own(micro, world), (batch.labels != self.ignored).sum()
            if mistake.startswith("own labels"):
                count = (labels != self.ignored).sum() * parts * (1 if "summed" in mistake else world.size)
            loss = loss_sum(model(micro.tokens), labels) / count
            loss.backward()
            total += loss.detach()
        if world.size > 1 and mistake != "not summed":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        dist.all_reduce(total)
        return float(total)

    def update(self, state: Any) -> None:
        state[1].step()
