"""Tensors that pass between two pipeline stages: several tensors, whose names, shapes and dtypes both ends know.

A stage hands over a tuple of tensors in the boundary's order. Downstream go all of them; upstream come the gradients of
those that have any, the floating-point ones, in the same order. A chunk of the model takes the tuple as its arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

Payload = tuple[torch.Tensor, ...]
"""The tensors of a boundary, in its order."""


@dataclass(frozen=True)
class BoundaryTensor:
    """One tensor of a boundary."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Boundary:
    """The tensors that pass from a chunk of the model to the next, for one micro-batch."""

    tensors: tuple[BoundaryTensor, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> Boundary:
        """Make a boundary from name → (shape, dtype), as a stage states them (``engine.module.StageModule``)."""
        return cls(tuple(BoundaryTensor(name, shape, dtype) for name, (shape, dtype) in tensors.items()))

    @cached_property
    def gradients(self) -> Boundary:
        """Boundary of the gradients that come back: one per floating-point tensor, with its shape and dtype."""
        return Boundary(tuple(t for t in self.tensors if t.dtype.is_floating_point))

    def empty(self, device: torch.device) -> Payload:
        """Return empty buffers to receive into."""
        return tuple(torch.empty(t.shape, dtype=t.dtype, device=device) for t in self.tensors)

    def check(self, payload: Payload) -> None:
        """Raise ValueError unless the payload has the shapes and dtypes for which the other end has made buffers."""
        found = tuple((tuple(x.shape), x.dtype) for x in payload)
        if found != tuple((t.shape, t.dtype) for t in self.tensors):
            made = ", ".join(f"{list(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in found)
            raise ValueError(
                f"a stage made {made or 'nothing'}, and the next one expects {', '.join(map(str, self.tensors))}; "
                "let boundary() of the model's stages state what their forward passes return"
            )
