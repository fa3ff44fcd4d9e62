"""The adapter of another trainer: what parity has to know of it, in some thirty lines of its user.

The reference is the same trainer on one process. Both start from the same weights and get the same batches, of which
each rank takes its share as the trainer does. ``megatron_port.parity`` exports what an adapter needs.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

PREFIXES = re.compile(r"(^|(?<=\.))(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Names that wrappers put before those of the model."""


@dataclass(frozen=True)
class Batch:
    """All samples of one step, the same on every rank. The adapter takes this rank's."""

    tokens: Tensor
    """[samples, sequence], int64."""
    labels: Tensor
    """[samples, sequence], int64: the token that follows, or ``Adapter.ignored``."""

    def __len__(self) -> int:
        return len(self.tokens)

    def share(self, index: int, count: int) -> Batch:
        """Return the samples of part ``index`` of ``count`` equal ones, neighbouring samples together."""
        size, rest = divmod(len(self), count)
        if rest:
            raise ValueError(f"{len(self)} samples do not divide by {count}; change Adapter.samples or the layout")
        return self[index * size : (index + 1) * size]

    def __getitem__(self, part: slice) -> Batch:
        return Batch(self.tokens[part], self.labels[part])


@dataclass(frozen=True)
class World:
    """Where a process is, and what the layout is. The reference is rank 0 of 1."""

    rank: int
    size: int
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of ``Adapter.layout`` and ``Adapter.model``, with what was set."""

    def __getitem__(self, name: str) -> Any:
        return self.options[name]


@dataclass(frozen=True)
class Shard:
    """A part of a parameter: block ``index`` of ``count`` along ``dim``.

    ``interleaved``: the dimension is so many equal blocks, each divided by itself, as packed queries, keys and values
    (3) or a gate and what it gates (2) are.
    """

    dim: int
    index: int
    count: int
    interleaved: int = 1


Placement = Shard | Sequence[Shard] | Tensor | None
"""How a rank holds a parameter: whole (None); a part, or a part of a part; or int64 [local shape], for each element its
index in the flat whole parameter and -1 for padding."""


class Adapter(ABC):
    """One trainer. Subclass it in a file of your own and give that file to ``megatron-port parity foreign``.

    :meth:`build` and :meth:`step` have to be written. The others have defaults that suit most trainers.
    """

    layout: ClassVar[Mapping[str, Any]] = {}
    """Options that say how the model is divided, with their values on one process."""
    model: ClassVar[Mapping[str, Any]] = {}
    """Options that ranks and reference share."""
    space: ClassVar[Mapping[str, Sequence[Any]]] = {}
    """Values of options that fuzzing draws from."""
    samples: ClassVar[int] = 8
    sequence: ClassVar[int] = 16
    vocabulary: ClassVar[int] = 64
    ignored: ClassVar[int | None] = None
    """Label that the loss leaves out. Where there is one, samples have different numbers of labels, so that a mean of
    means is seen."""
    tolerance: ClassVar[float | None] = None
    """Relative distance that a gradient may have; None: 1e-9 in fp64, 1e-4 in fp32, 3e-2 and 1e-2 where gradients or
    outputs of modules are bf16 or fp16."""
    modules_seen: ClassVar[bool] = True
    """Outputs of modules are compared too, so that the first difference can be named."""

    def legal(self, options: Mapping[str, Any], size: int) -> str:
        """Return why ``size`` ranks cannot have these options; empty: they can."""
        return ""

    def axes(self, world: World) -> Mapping[str, int]:
        """Return the axes that ranks are arranged in, with their sizes; neighbouring ranks differ in the last one.
        Ranks of ``cp`` have other positions of the same samples."""
        return {"dp": world.size}

    def start(self, world: World) -> None:
        """Join the other ranks. RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set."""
        torch.distributed.init_process_group("gloo", rank=world.rank, world_size=world.size)

    @abstractmethod
    def build(self, world: World) -> Any:
        """Return model, optimizer and what else a step needs, as any object."""

    @abstractmethod
    def step(self, state: Any, batch: Batch, world: World) -> Any:
        """Forward and backward pass, gradients reduced as before an update. Return the loss, or None on ranks that do
        not know it. Gradients of the step before must be gone."""

    def update(self, state: Any) -> None:
        """Update the weights. By default they stay."""
        return

    def modules(self, state: Any) -> Iterable[tuple[str, nn.Module]]:
        """Yield the modules of this rank, each with the prefix of its names. By default ``state`` or ``state.model``,
        or the first module of a tuple."""
        parts = state if isinstance(state, tuple) else (state, getattr(state, "model", None))
        for part in parts:
            if isinstance(part, nn.Module):
                yield "", part
                return
        raise TypeError(f"no module in {type(state).__name__}; write {type(self).__name__}.modules")

    def name(self, name: str) -> str:
        """Return the name that the reference has for a module or parameter. Names that wrappers add are left out."""
        return PREFIXES.sub("", name)

    def parameters(self, state: Any) -> Mapping[str, Tensor]:
        """Return the parameters of this rank by the reference's names."""
        return {
            self.name(f"{prefix}{name}"): parameter
            for prefix, module in self.modules(state) for name, parameter in module.named_parameters()
        }

    def placements(self, state: Any, world: World) -> Mapping[str, Placement]:
        """Return how this rank holds parameters where neither DTensor, nor Megatron's attributes, nor the shape say."""
        return {}

    def load(self, state: Any, weights: Mapping[str, Tensor]) -> bool:
        """Load whole weights by the trainer's own means and return True. Where it is False, they are copied by their
        placements; where it is True, placements are found by looking for the values."""
        return False

    def loaded(self, state: Any) -> None:
        """Take up what was loaded, such as copies of the weights in the optimizer. By default there are none."""
        return

    def gradients(self, state: Any) -> Mapping[str, Tensor | None]:
        """Return this rank's gradients by the reference's names, each as its parameter is placed, or whole. A name that
        is left out is not compared."""
        return {name: parameter.grad for name, parameter in self.parameters(state).items() if parameter.requires_grad}

    def weights(self, state: Any) -> Mapping[str, Tensor]:
        """Return this rank's weights after an update, each as its parameter is placed, or whole."""
        return self.parameters(state)

    def norm(self, state: Any) -> float | None:
        """Return the gradient norm that the trainer has found; None: it says none."""
        return None
