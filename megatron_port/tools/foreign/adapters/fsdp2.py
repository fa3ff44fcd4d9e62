"""``torch.distributed.fsdp.fully_shard`` (FSDP2) with a small GPT, also as hybrid sharding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_port.tools.foreign.adapter import Adapter, Batch, World
from megatron_port.tools.foreign.adapters._gpt import Gpt, loss_sum, step_of_replicas


class Fsdp2(Adapter):
    """Parameters sharded over ``shard`` ranks and copied over the others. FSDP averages gradients, as DDP does."""

    layout: ClassVar[Mapping[str, Any]] = {"replicas": 1, "micro_batches": 1, "reshard": True}
    model: ClassVar[Mapping[str, Any]] = {"fp64": True}
    space: ClassVar[Mapping[str, Any]] = {
        "replicas": (1, 2), "micro_batches": (1, 2), "reshard": (True, False), "fp64": (True, False),
    }
    ignored = -100

    def legal(self, options: Mapping[str, Any], size: int) -> str:
        return "" if size % options["replicas"] == 0 else f"{size} ranks are no {options['replicas']} equal groups"

    def axes(self, world: World) -> Mapping[str, int]:
        return {"replicas": world["replicas"], "shard": world.size // world["replicas"]}

    def build(self, world: World) -> tuple[Any, torch.optim.Optimizer]:
        model: Any = Gpt(self.vocabulary, self.sequence).to(torch.float64 if world["fp64"] else torch.float32)
        if world.size > 1:
            axes = self.axes(world)
            dims = {axis: size for axis, size in axes.items() if axis == "shard" or size > 1}
            mesh = init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))
            for layer in model.layers.values():
                fully_shard(layer, mesh=mesh, reshard_after_forward=world["reshard"])
            fully_shard(model, mesh=mesh, reshard_after_forward=world["reshard"])
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)

    def step(self, state: Any, batch: Batch, world: World) -> float:
        model, labels = state[0], (batch.labels != self.ignored).sum()
        return step_of_replicas(
            state, batch, world, lambda micro: loss_sum(model(micro.tokens), micro.labels) / labels,
            lambda last: model.set_requires_gradient_sync(last),
        )

    def update(self, state: Any) -> None:
        state[1].step()
