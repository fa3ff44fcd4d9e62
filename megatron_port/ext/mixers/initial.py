"""Initial values of the parameters of recurrences that are not normal or uniform (``dist.record.initial_values``).

Logarithms are taken on the host, so that every device begins with the same bits.
"""

from __future__ import annotations

import math

import torch


def decay_rates(drawn: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Return logarithms of rates that are uniform from 0 to 16; ``drawn``: uniform in (0, 1)."""
    return (drawn.cpu() * 16.0).log().to(drawn.device)


def decay_rates_from_1(drawn: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Return logarithms of rates that are uniform from 1 to 16."""
    return (drawn.cpu() * 15.0 + 1.0).log().to(drawn.device)


def time_steps(drawn: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Return what softplus makes steps from 0.001 to 0.1 of, whose logarithms are uniform."""
    low, high = math.log(0.001), math.log(0.1)
    steps = (drawn.cpu() * (high - low) + low).exp()
    return (steps + (-(-steps).expm1()).log()).to(drawn.device)
