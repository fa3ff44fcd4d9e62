"""Frequencies of rotary position embedding that are scaled for longer contexts."""

from __future__ import annotations

import math

import torch

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.model.rotary import RotaryScaling


def _llama3(wave: torch.Tensor, model: ModelConfig) -> torch.Tensor:
    """Llama 3.1's rule: short waves stay, long ones are stretched by the factor, those between blend.

    A wave is long where the original context holds fewer than ``rope_low_freq_factor`` turns of it.
    """
    inverse = 1.0 / wave
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


def _yarn_factor(model: ModelConfig) -> float:
    return model.rope_attention_factor or 1.0 + 0.1 * math.log(model.rope_factor)


LINEAR = RotaryScaling(lambda wave, model: 1.0 / wave / model.rope_factor)
LLAMA3 = RotaryScaling(_llama3)
YARN = RotaryScaling(_yarn, _yarn_factor)
