"""``torch.nn.parallel.DistributedDataParallel`` with a small GPT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megatron_port.tools.foreign.adapter import Adapter, Batch, World
from megatron_port.tools.foreign.adapters._gpt import Gpt, loss_sum, step_of_replicas


class Ddp(Adapter):
    """Replicas. DDP averages gradients, so the loss is divided by the step's labels and multiplied by the replicas."""

    layout: ClassVar[Mapping[str, Any]] = {"micro_batches": 1}
    model: ClassVar[Mapping[str, Any]] = {"fp64": True}
    space: ClassVar[Mapping[str, Any]] = {"micro_batches": (1, 2), "fp64": (True, False)}
    ignored = -100

    def build(self, world: World) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Gpt(self.vocabulary, self.sequence).to(torch.float64 if world["fp64"] else torch.float32)
        wrapped = DistributedDataParallel(model) if world.size > 1 else model
        return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-3, eps=1e-5)

    def step(self, state: Any, batch: Batch, world: World) -> float:
        model, labels = state[0], (batch.labels != self.ignored).sum()

        def reduces(last: bool) -> None:
            model.require_backward_grad_sync = last

        return step_of_replicas(
            state, batch, world, lambda micro: loss_sum(model(micro.tokens), micro.labels) / labels, reduces
        )

    def update(self, state: Any) -> None:
        state[1].step()
