"""Tables of rotary position embedding (Su et al., arXiv 2104.09864): whole or partial, scaled for longer contexts.

Element i of a head pairs with i + d/2, whatever share of the head is rotated: with a share of r the first r·d/2 pairs
turn and the others have frequency 0. (GPT-NeoX keeps the rotated elements first, i with i + r·d/2; since queries and
keys are permuted alike, their products are the same, and ``interop`` permutes the rows of its weights.)
"""

from __future__ import annotations

import math

import torch

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.dist.positions import Positions
from megatron_port.core.model.recompute import mark_as_of_all_layers
from megatron_port.core.model.spec import Rotation

_KEPT = 8
"""Sets of positions whose rows are kept: those of the micro-batches in flight, where each has its own."""
Tables = tuple[torch.Tensor, torch.Tensor]
"""cos and sin, float32 [rows, head_size / 2]; float64 of a model in float64 that has a factor on its scores"""


def frequencies(model: ModelConfig, device: torch.device | str, rotation: Rotation = "usual") -> torch.Tensor:
    """float32 [head_size / 2]: radians per token of each pair.

    In float32 as in transformers, so that imported weights give its logits.
    """
    size, rotated = model.head_size, model.rotary_size
    exponent = torch.arange(0, rotated, 2, dtype=torch.int64, device=device).float() / rotated
    wave = (model.window_rope_theta if rotation == "window" else model.rope_theta) ** exponent  # tokens per radian
    inverse = 1.0 / wave
    if rotation != "usual":
        inverse = inverse if rotation == "window" else torch.zeros_like(inverse)
    elif model.rope_scaling == "linear":
        inverse = inverse / model.rope_factor
    elif model.rope_scaling == "llama3":
        inverse = _llama3(inverse, model)
    elif model.rope_scaling == "yarn":
        inverse = _yarn(wave, model)
    return torch.cat((inverse, torch.zeros((size - rotated) // 2, device=device)))


def _llama3(inverse: torch.Tensor, model: ModelConfig) -> torch.Tensor:
    """Llama 3.1's rule: short waves stay, long ones are stretched by the factor, those between blend.

    A wave is long where the original context holds fewer than ``rope_low_freq_factor`` turns of it.
    """
    low, high, original = model.rope_low_freq_factor, model.rope_high_freq_factor, model.rope_original_length
    wave = 2 * math.pi / inverse
    smooth = (original / wave - low) / (high - low)
    blended = (1 - smooth) * (inverse / model.rope_factor) + smooth * inverse
    stretched = torch.where(wave > original / low, inverse / model.rope_factor, inverse)
    between = (wave >= original / high) & (wave <= original / low)
    return torch.where(between, blended, stretched)


def _yarn(wave: torch.Tensor, model: ModelConfig) -> torch.Tensor:
    """Return YaRN's frequencies for the usual ``wave``, rounded where transformers rounds: at position 100,000 the last
    bit of a frequency is 0.006 radians.

    Pairs that turn ``rope_beta_fast`` times or more in the original context stay, those that turn
    ``rope_beta_slow`` times or fewer are divided by the factor, with a ramp over the pairs between. Its ends are whole
    pairs or, without ``rope_truncate``, where these turns lie."""
    last = model.rotary_size - 1

    def pair(turns: float) -> float:
        """The pair, by a real number, that turns so often in the original context."""
        wave = model.rope_original_length / (2 * math.pi * turns)
        return model.rotary_size * math.log(wave) / (2 * math.log(model.rope_theta))

    fast, slow = pair(model.rope_beta_fast), pair(model.rope_beta_slow)
    if model.rope_truncate:
        fast, slow = math.floor(fast), math.ceil(slow)
    first, stop = max(fast, 0), min(slow, last)
    pairs = torch.arange(len(wave), device=wave.device).float()
    kept = 1 - ((pairs - first) / ((stop - first) or 1e-3)).clamp(0, 1)
    return 1.0 / (model.rope_factor * wave) * (1 - kept) + 1.0 / wave * kept


def yarn_factor(model: ModelConfig, rotation: Rotation = "usual") -> float:
    """Return the factor on cos and sin of the pairs that turn, where YaRN scales their frequencies."""
    if model.rope_scaling != "yarn" or rotation != "usual":
        return 1.0
    return model.rope_attention_factor or 1.0 + 0.1 * math.log(model.rope_factor)


def score_factor(model: ModelConfig) -> float:
    """Return the factor on queries and keys, thus on all pairs' cos and sin: the square root of what
    ``attention_scale`` changes in their products."""
    return math.sqrt(model.attention_scale * math.sqrt(model.head_size)) if model.attention_scale else 1.0


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
            yarn, scale = yarn_factor(self.model, self.rotation), score_factor(self.model)
            if self.dtype == torch.float64 and scale != 1.0:  # rounded to float32, products would be 1e-7 off
                cos, sin = (torch.cat((t[:, :turning] * yarn, t[:, turning:]), dim=1).double() for t in (cos, sin))
                yarn = 1.0
            for pairs, factor in ((slice(turning), yarn * scale), (slice(turning, None), scale)):
                if factor != 1.0:
                    cos[:, pairs] *= factor
                    sin[:, pairs] *= factor
            found = self._made[device] = mark_as_of_all_layers(cos), mark_as_of_all_layers(sin)
        return found
