"""Tables of rotary position embedding (Su et al., arXiv 2104.09864): whole or partial.

Element i of a head pairs with i + d/2, whatever share of the head is rotated: with a share of r the first r·d/2 pairs
turn and the others have frequency 0. (GPT-NeoX keeps the rotated elements first, i with i + r·d/2; since queries and
keys are permuted alike, their products are the same, and ``interop`` permutes the rows of its weights.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.dist.positions import Positions
from megatron_port.core.model.spec import Rotation
from megatron_port.core.registry import PARTS

_KEPT = 8
"""Sets of positions whose rows are kept: those of the micro-batches in flight, where each has its own."""
Tables = tuple[torch.Tensor, torch.Tensor]
"""cos and sin, float32 [rows, head_size / 2]; float64 of a model in float64 that has a factor on its scores"""


@dataclass(frozen=True)
class RotaryScaling:
    """How a model changes its frequencies for longer contexts (``model.rope_scaling``)."""

    frequencies: Callable[[torch.Tensor, ModelConfig], torch.Tensor]
    """(tokens per radian of each pair, model) → radians per token."""
    factor: Callable[[ModelConfig], float] = lambda model: 1.0
    """Factor on cos and sin of the pairs that turn."""


def _scaling(model: ModelConfig, rotation: Rotation) -> RotaryScaling | None:
    if model.rope_scaling == "none" or rotation != "usual":
        return None
    return PARTS.get(f"rotary scaling, {model.rope_scaling}", RotaryScaling)


def turning_factor(model: ModelConfig, rotation: Rotation = "usual") -> float:
    """Return the factor on cos and sin of the pairs that turn."""
    scaling = _scaling(model, rotation)
    return 1.0 if scaling is None else scaling.factor(model)


def frequencies(model: ModelConfig, device: torch.device | str, rotation: Rotation = "usual") -> torch.Tensor:
    """float32 [head_size / 2]: radians per token of each pair.

    In float32 as in transformers, so that imported weights give its logits.
    """
    size, rotated = model.head_size, model.rotary_size
    exponent = torch.arange(0, rotated, 2, dtype=torch.int64, device=device).float() / rotated
    wave = (model.window_rope_theta if rotation == "window" else model.rope_theta) ** exponent  # tokens per radian
    scaling = _scaling(model, rotation)
    inverse = 1.0 / wave if scaling is None else scaling.frequencies(wave, model)
    if rotation == "none":
        inverse = torch.zeros_like(inverse)
    return torch.cat((inverse, torch.zeros((size - rotated) // 2, device=device)))


def score_factor(model: ModelConfig) -> float:
    """Return the factor on queries and keys, thus on all pairs' cos and sin: the square root of what
    ``attention_scale`` changes in their products."""
    return math.sqrt(model.attention_scale * math.sqrt(model.head_size)) if model.attention_scale else 1.0


def is_of_all_layers(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is marked as one that all layers share (rotary tables): it is no layer's to park."""
    return getattr(tensor, "of_all_layers", False) or getattr(tensor._base, "of_all_layers", False)


def mark_as_of_all_layers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, marked so."""
    tensor.of_all_layers = True  # type: ignore[attr-defined]
    return tensor


class RotaryTables:
    """cos and sin of a model, made once and shared by all its layers of a kind of rotation. Those that do not rotate
    take the tables for their factor alone: all angles are 0."""

    def __init__(self, model: ModelConfig, rotation: Rotation = "usual", dtype: torch.dtype = torch.float32) -> None:
        self.model, self.rotation, self.dtype = model, rotation, dtype
        self._made: dict[torch.device, Tables] = {}
        self._gathered: dict[tuple[torch.device, Positions], Tables] = {}

    def rows(self, positions: Positions, device: torch.device) -> Tables:
        """Return the rows (cos, sin) of these positions, in their order."""
        made = self._table(positions.stop, device)
        if len(positions.runs) == 1:
            return made if positions.count == len(made[0]) else (positions.take(made[0]), positions.take(made[1]))
        found = self._gathered.pop((device, positions), None)
        if found is None:
            found = mark_as_of_all_layers(positions.take(made[0])), mark_as_of_all_layers(positions.take(made[1]))
            if len(self._gathered) >= _KEPT:
                del self._gathered[next(iter(self._gathered))]
        self._gathered[device, positions] = found  # the last: what has not been asked for longest goes first
        return found

    def rows_at(self, positions: torch.Tensor, length: int) -> Tables:
        """Return the rows of any positions below ``length``, int64 [rows], known on the device only."""
        cos, sin = self._table(length, positions.device)
        return cos[positions], sin[positions]

    def _table(self, length: int, device: torch.device) -> Tables:
        """Tables of at least ``length`` rows: row i is for position i."""
        found = self._made.get(device)
        if found is None or found[0].shape[0] < length:
            rows = length if found is None else max(length, 2 * found[0].shape[0])
            angle = torch.outer(
                torch.arange(rows, device=device).float(), frequencies(self.model, device, self.rotation)
            )
            cos, sin, turning = angle.cos(), angle.sin(), self.model.rotary_size // 2
            factor, scale = turning_factor(self.model, self.rotation), score_factor(self.model)
            if self.dtype == torch.float64 and scale != 1.0:  # rounded to float32, products would be 1e-7 off
                cos, sin = (torch.cat((t[:, :turning] * factor, t[:, turning:]), dim=1).double() for t in (cos, sin))
                factor = 1.0
            for pairs, by in ((slice(turning), factor * scale), (slice(turning, None), scale)):
                if by != 1.0:
                    cos[:, pairs] *= by
                    sin[:, pairs] *= by
            found = self._made[device] = mark_as_of_all_layers(cos), mark_as_of_all_layers(sin)
        return found
