"""``torch.distributed.tensor.parallel`` (DTensor) with a small GPT: heads and feed-forward features divided."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from megatron_port.tools.foreign.adapter import Adapter, Batch, World
from megatron_port.tools.foreign.adapters._gpt import HEADS, Gpt, loss_sum


class TensorParallel(Adapter):
    """``tp`` ranks divide a layer, ``sp``: norms divide the sequence; the others have other samples, by FSDP2."""

    layout: ClassVar[Mapping[str, Any]] = {"tp": 1, "sp": False}
    model: ClassVar[Mapping[str, Any]] = {"fp64": True}
    space: ClassVar[Mapping[str, Any]] = {"tp": (1, 2, 4), "sp": (False, True), "fp64": (True, False)}
    ignored = -100

    def legal(self, options: Mapping[str, Any], size: int) -> str:
        if size % options["tp"] or HEADS % options["tp"]:
            return f"tp {options['tp']} divides neither {size} ranks nor {HEADS} heads"
        return "sp divides the sequence over tp, which is 1" if options["sp"] and options["tp"] == 1 else ""

    def axes(self, world: World) -> Mapping[str, int]:
        return {"dp": world.size // world["tp"], "tp": world["tp"]}

    def build(self, world: World) -> tuple[Any, torch.optim.Optimizer]:
        model: Any = Gpt(self.vocabulary, self.sequence).to(torch.float64 if world["fp64"] else torch.float32)
        axes = self.axes(world)
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        if world["tp"] > 1:
            self._divide(model, mesh["tp"], sp=world["sp"])
        if axes["dp"] > 1:
            for layer in model.layers.values():
                fully_shard(layer, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5, foreach=False)

    def _divide(self, model: Gpt, mesh: Any, *, sp: bool) -> None:
        column: dict[str, Any] = {name: ColwiseParallel() for name in ("queries", "keys", "values", "up")}
        for layer in model.layers.values():
            plan = {**column, "output": RowwiseParallel(), "down": RowwiseParallel()}
            if sp:
                plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("output", "down")}
                plan |= {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
                plan |= {name: ColwiseParallel(input_layouts=Shard(1)) for name in column}
            parallelize_module(layer, mesh, plan)
        ends: dict[str, Any] = {"head": ColwiseParallel(output_layouts=Replicate())}
        if sp:
            ends = {"norm": SequenceParallel(),
                    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
                    "layers.0": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),),
                                                   use_local_output=True)}
        parallelize_module(model, mesh, ends)

    def step(self, state: Any, batch: Batch, world: World) -> float:
        model, optimizer = state
        optimizer.zero_grad()
        replicas = self.axes(world)["dp"]
        labels = (batch.labels != self.ignored).sum()
        mine = batch.share(world.rank // world["tp"], replicas)
        loss = loss_sum(model(mine.tokens), mine.labels) * (replicas / labels)
        loss.backward()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        return float(total) / world.size

    def update(self, state: Any) -> None:
        state[1].step()
