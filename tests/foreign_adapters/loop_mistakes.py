"""A training loop with its own all-reduce, and mistakes that people make in one: what parity must find and name.

The option ``mistake`` is the name of one. One process makes none, as a script that is right on one process. Each says
which kind of relation the tool must find, and a word that its sentence must have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_port.parity import Adapter, Batch, World
from megatron_port.tools.foreign.adapters._gpt import Gpt, loss_sum


class Right:
    """No mistake. Replicas, gradients summed, the loss divided by the step's labels."""

    kind, word = "", ""

    def share(self, batch: Batch, world: World) -> Batch:
        return batch.share(world.rank, world.size)

    def labels(self, batch: Batch, micro: Batch, world: World) -> Tensor:
        """By what a micro-batch's sum of losses is divided."""
        return (batch.labels != -100).sum()

    def clears(self) -> bool:
        return True

    def forward(self, model: Gpt, micro: Batch, world: World) -> Tensor:
        logits: Tensor = model(micro.tokens)
        return logits

    def reduce(self, name: str, gradient: Tensor, world: World) -> None:
        dist.all_reduce(gradient)

    def reduces_after(self, index: int, count: int) -> bool:
        """After which micro-batches gradients are reduced."""
        return index == count - 1

    def gradients(self, named: dict[str, Tensor], world: World) -> None:
        """Change gradients after all."""

    def norm(self, named: Mapping[str, Tensor], world: World) -> float:
        return float(sum(g.square().sum() for g in named.values()) ** 0.5)


class NotReduced(Right):
    kind, word = "not reduced", "is not summed over dp"

    def reduce(self, name: str, gradient: Tensor, world: World) -> None:
        pass


class SummedTwice(Right):
    kind, word = "factor", "the size of dp"

    def reduce(self, name: str, gradient: Tensor, world: World) -> None:
        dist.all_reduce(gradient)
        dist.all_reduce(gradient)


class AveragedToo(Right):
    kind, word = "factor", "1 / the size of dp"

    def reduce(self, name: str, gradient: Tensor, world: World) -> None:
        dist.all_reduce(gradient)
        gradient /= world.size


class OwnLabels(Right):
    kind, word = "samples", "mean of means"

    def labels(self, batch: Batch, micro: Batch, world: World) -> Tensor:
        return (micro.labels != -100).sum() * (len(batch) // len(micro))


class SampleLeftOut(Right):
    kind, word = "samples", "leaves out samples 7"

    def share(self, batch: Batch, world: World) -> Batch:
        mine = batch.share(world.rank, world.size)
        if world.rank == world.size - 1:
            mine.labels[-1] = -100
        return mine

    def labels(self, batch: Batch, micro: Batch, world: World) -> Tensor:
        return torch.tensor(92 if world.size else 0)  # of the whole step


class SharesOverlap(Right):
    kind, word = "samples", "sample"

    def share(self, batch: Batch, world: World) -> Batch:
        size, shift = len(batch) // world.size, min(1, world.rank)
        return batch[world.rank * size - shift : (world.rank + 1) * size - shift]


class NotCleared(Right):
    kind, word = "not cleared", "not cleared"

    def clears(self) -> bool:
        return False


class LayerNotReduced(Right):
    kind, word = "not reduced", "layers.1"

    def reduce(self, name: str, gradient: Tensor, world: World) -> None:
        if not name.startswith("layers.1."):
            dist.all_reduce(gradient)


class NormsNotReduced(Right):
    kind, word = "not reduced", "norm"

    def reduce(self, name: str, gradient: Tensor, world: World) -> None:
        if "norm" not in name:
            dist.all_reduce(gradient)


class PositionsStartAnew(Right):
    kind, word = "", "positions"

    def forward(self, model: Gpt, micro: Batch, world: World) -> Tensor:
        shift = 4 * world.rank
        x = model.tokens(micro.tokens) + model.positions((torch.arange(micro.tokens.shape[1]) + shift) % 16)
        for layer in model.layers.values():
            x = layer(x)
        logits: Tensor = model.head(model.norm(x))
        return logits


class Rounded(Right):
    kind, word = "rounded", "bf16"

    def reduce(self, name: str, gradient: Tensor, world: World) -> None:
        small = gradient.bfloat16()
        dist.all_reduce(small)
        gradient.copy_(small)


class OneRankLeftOut(Right):
    kind, word = "copies", "head"

    def gradients(self, named: dict[str, Tensor], world: World) -> None:
        if world.rank == 1:
            named["head.weight"] += 0.3 * torch.randn(named["head.weight"].shape, dtype=torch.float64)


class ReducedTooOften(Right):
    kind, word = "samples", "sample"

    def reduces_after(self, index: int, count: int) -> bool:
        return True


class Ascends(Right):
    kind, word = "factor", "sign"

    def gradients(self, named: dict[str, Tensor], world: World) -> None:
        for gradient in named.values():
            gradient.neg_()


class HeadTransposed(Right):
    kind, word = "permuted", "transposed"

    def gradients(self, named: dict[str, Tensor], world: World) -> None:
        weight = named["layers.0.output.weight"]
        weight.copy_(weight.T.clone())


class Shifted(Right):
    kind, word = "permuted", "shifted by 1"

    def gradients(self, named: dict[str, Tensor], world: World) -> None:
        named["positions.weight"].copy_(named["positions.weight"].roll(-1, 0))


class HeadScaled(Right):
    """One head's values."""

    kind, word = "slices", "8-15 of 32"

    def gradients(self, named: dict[str, Tensor], world: World) -> None:
        named["layers.0.values.weight"][8:16] *= world.size


class RowsLost(Right):
    kind, word = "masked", "zero"

    def gradients(self, named: dict[str, Tensor], world: World) -> None:
        named["tokens.weight"][::3, 1:] = 0


class Frozen(Right):
    kind, word = "zero", "is zero"

    def gradients(self, named: dict[str, Tensor], world: World) -> None:
        named["layers.1.up.bias"].zero_()


class NotFinite(Right):
    kind, word = "not finite", "not finite"

    def gradients(self, named: dict[str, Tensor], world: World) -> None:
        named["norm.bias"][0] = torch.nan


class NormOfOwn(Right):
    kind, word = "norm", "norm"

    def norm(self, named: Mapping[str, Tensor], world: World) -> float:
        return super().norm(named, world) * world.size**0.5


MISTAKES = {kind.__name__: kind for kind in Right.__subclasses__()}


class Script(Adapter):
    """The loop. ``micro_batches``: of a rank."""

    layout: ClassVar[Mapping[str, Any]] = {"micro_batches": 1, "mistake": ""}
    space: ClassVar[Mapping[str, Any]] = {"micro_batches": (1, 2), "mistake": ("", *MISTAKES)}
    ignored = -100

    def build(self, world: World) -> Any:
        model = Gpt(self.vocabulary, self.sequence).double()
        return model, torch.optim.SGD(model.parameters(), lr=0.1), {}

    def step(self, state: Any, batch: Batch, world: World) -> float:
        model, optimizer, said = state
        loop: Right = MISTAKES[world["mistake"]]() if world["mistake"] else Right()
        if loop.clears():
            optimizer.zero_grad()
        mine, total, count = loop.share(batch, world), torch.zeros((), dtype=torch.float64), world["micro_batches"]
        for index in range(count):
            micro = mine.share(index, count)
            loss = loss_sum(loop.forward(model, micro, world), micro.labels) / loop.labels(batch, micro, world)
            loss.backward()
            total += loss.detach()
            if loop.reduces_after(index, count) and world.size > 1:
                for name, p in model.named_parameters():
                    loop.reduce(name, p.grad, world)
        named = {name: p.grad for name, p in model.named_parameters()}
        loop.gradients(named, world)
        dist.all_reduce(total)
        said["norm"] = loop.norm(named, world)
        return float(total)

    def norm(self, state: Any) -> float | None:
        norm: float = state[2]["norm"]
        return norm

    def update(self, state: Any) -> None:
        state[1].step()
