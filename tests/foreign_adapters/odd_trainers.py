"""Trainers that do something unusual, as ``odd`` says, or wrong, as ``mistake`` says; one process makes no mistake."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megatron_port.parity import Adapter, Batch, World
from megatron_port.tools.foreign.adapters._gpt import Gpt, loss_sum

RIGHT = ("autocast", "adam's own eps", "unused", "packed in a dataclass", "rows in another order",
         "tied, named in another order")
WRONG = {
    "gradient of what is not used": "gradient of spare.weight (ranks 0-1) is up to 7, where one process has none",
    "norm is no number": "gradient norm (ranks 0-1) is nan, the right one",
    "loss is no number": "loss (ranks 0-1) is nan",
    "a layer is not built": "weight of spare.bias, spare.weight is on no rank",
    "output is no number": "mlp_norm, which is right: 16 of 64 rows on rank 1 have NaN, the first in row 16, column 3",
}


@dataclass
class Packed:
    logits: Tensor
    extra: Any = None


class Model(nn.Module):
    """The small GPT, and a layer that takes no part."""

    def __init__(self, vocabulary: int, sequence: int, packed: bool) -> None:
        super().__init__()
        self.gpt, self.spare, self.packed = Gpt(vocabulary, sequence), nn.Linear(4, 4), packed

    def forward(self, tokens: Tensor) -> Any:
        logits = self.gpt(tokens)
        return Packed(logits, {"twice": (2 * logits,)}) if self.packed else logits


def _spoiled(module: nn.Module, given: Any, result: Tensor) -> Tensor:
    """Put a NaN in each element of a column of the second sample, which is of no consequence to the first."""
    found = result.clone()
    found[1, :, 3] = torch.nan
    return found


class Odd(Adapter):
    layout: ClassVar[Mapping[str, Any]] = {"mistake": ""}
    model: ClassVar[Mapping[str, Any]] = {"odd": ""}
    ignored = -100

    def build(self, world: World) -> Any:
        odd = world["odd"]
        model: Any = Model(self.vocabulary, self.sequence, odd == "packed in a dataclass")
        if odd.startswith("tied"):
            model.gpt.head.weight = model.gpt.tokens.weight
            if world.size > 1:  # the head comes first
                parts = model.gpt._modules
                model.gpt._modules = {"head": parts["head"], **parts}
        if world.size > 1:
            if world["mistake"] == "a layer is not built":
                del model.spare
            if world["mistake"] == "output is no number" and world.rank == 1:
                model.gpt.layers["1"].up.register_forward_hook(_spoiled)
            model = DistributedDataParallel(model, find_unused_parameters=True)
        eps = 1e-8 if odd == "adam's own eps" else 1e-5
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=eps), {}

    def placements(self, state: Any, world: World) -> Mapping[str, Any]:
        """Rows of the head backwards, on ranks."""
        if world["odd"] != "rows in another order" or world.size == 1:
            return {}
        table = torch.arange(self.vocabulary * 32).reshape(self.vocabulary, 32)
        return {"gpt.head.weight": table.flip(0)}

    def step(self, state: Any, batch: Batch, world: World) -> float:
        model, optimizer, said = state
        optimizer.zero_grad()
        labels = (batch.labels != self.ignored).sum()
        mine = batch.share(world.rank, world.size)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=world["odd"] == "autocast"):
            found = model(mine.tokens)
        logits = (found.logits if isinstance(found, Packed) else found).float()
        if world["odd"] == "rows in another order" and world.size > 1:
            logits = logits.flip(-1)
        loss = loss_sum(logits, mine.labels) * (world.size / labels)
        loss.backward()
        mistake = world["mistake"]
        if mistake == "gradient of what is not used":
            spare = dict(self.parameters(state))["spare.weight"]
            spare.grad = torch.full_like(spare, 7)
        said["norm"] = torch.nan if mistake == "norm is no number" else None
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        return torch.nan if mistake == "loss is no number" else float(total) / world.size

    def norm(self, state: Any) -> float | None:
        norm: float | None = state[2]["norm"]
        return norm

    def update(self, state: Any) -> None:
        state[1].step()


class Silent(Odd):
    """A trainer whose gradients are gone, and that makes no update."""

    def gradients(self, state: Any) -> Mapping[str, Tensor | None]:
        return dict.fromkeys(self.parameters(state))

    def update(self, state: Any) -> None:
        pass
