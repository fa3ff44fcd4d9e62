"""Teacher's distribution at a position as a file stores it: its most likely tokens, and the mass of all others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Stored:
    """Distributions at the temperature that the file states; log-probabilities are natural.

    Leading dimensions are those of the tokens.
    """

    ids: torch.Tensor
    """int64 [..., k]: the most likely tokens"""
    log_probabilities: torch.Tensor
    """[..., k]: theirs"""
    log_tail: torch.Tensor
    """[...]: of any other token; -inf where there is none"""

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Stored:
        """Return this with each tensor changed."""
        return Stored(change(self.ids), change(self.log_probabilities), change(self.log_tail))
