"""Initial values of the parameters of recurrences that are not normal or uniform (``dist.record.initial_values``).

Logarithms are taken on the host, so that every device begins with the same bits.
"""

from __future__ import annotations

import torch


def decay_rates(drawn: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Return logarithms of rates that are uniform from 0 to 16; ``drawn``: uniform in (0, 1)."""
    return (drawn.cpu() * 16.0).log().to(drawn.device)
