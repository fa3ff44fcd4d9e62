"""Pieces of a run's state by canonical name: what engines yield, and what they read it from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

WEIGHT = "weight"
"""Kind of a parameter itself: its fp32 master where the weights are narrower."""
BUFFER = "buffer"
"""Kind of state of the model that no gradient changes (a router's balance bias): fp32 in every run, never cast."""


@dataclass(frozen=True)
class StatePiece:
    """A contiguous range of one tensor of the training state that this rank owns.

    The box (``offset``, ``shape``) is a slice of the parameter's logical global
    tensor; ``tensor`` is the 1-D range that starts at ``flat_start`` of the
    row-major flattening of that box. ``kind``: ``WEIGHT``, ``BUFFER``, or a kind of
    state that the optimizer rule gives the parameter (``exp_avg``).
    """

    name: str
    kind: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    flat_start: int
    tensor: torch.Tensor


class StateReader(Protocol):
    """Source of an engine's state: a checkpoint, an initialisation, a folder of another system."""

    def __call__(
        self, name: str, kind: str, offset: tuple[int, ...], shape: tuple[int, ...], /, *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the slice ``offset + shape`` of a tensor, as a tensor of that shape.

        ``out`` is an offer: a reader that can puts the slice there and returns ``out`` itself, which saves memory and a
        copy; otherwise it leaves it alone and returns a tensor of its own. After an error its content is undefined.
        """
