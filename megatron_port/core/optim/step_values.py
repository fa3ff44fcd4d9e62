"""The numbers in which one optimizer step differs from the next, for kernels to read on the device.

What a kernel takes by value is fixed when its launch is recorded (a CUDA graph); what it reads from memory is the
replayed step's own. One copy per step brings all of them, and no kernel is launched for a single number.
"""

from __future__ import annotations

import math
import sys
from dataclasses import astuple, dataclass

import torch


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of a step, as the host knows them."""

    lr: float = 0.0
    """Learning rate."""
    loss_factor: float = 1.0
    """Factor of the loss in the backward pass: loss scale over the tokens of the step."""
    sample_factor: float = 1.0
    """Factor of a term that is a mean over the step's samples: loss scale over their number."""
    tokens: float = 0.0
    """Loss tokens of the step over all replicas."""
    replica_tokens: float = 0.0
    """This replica's share of them."""
    scale: float = 1.0
    """Loss scale."""
    largest_loss: float = sys.float_info.max
    """Largest mean loss with which the update is applied; finite."""
    largest_norm: float = sys.float_info.max
    """Largest gradient norm with which the update is applied; finite."""
    norm_mean: float = 0.0
    """Mean of earlier gradient norms, and their standard deviation, for adaptive clipping (``optim.clipping``)."""
    norm_deviation: float = sys.float_info.max


class StepValues:
    """The step's numbers as float64 scalars at fixed addresses on the device. ``host``: the numbers themselves."""

    def __init__(self, device: torch.device) -> None:
        self.host = StepNumbers()
        self._all = torch.zeros(11, dtype=torch.float64, device=device)
        (
            self.lr, self.loss_factor, self.sample_factor, self.tokens, self.replica_tokens, _, self.largest_loss,
            self.largest_norm, self.norm_mean, self.norm_deviation, self.inv_scale,
        ) = self._all.unbind()

    def set(self, numbers: StepNumbers) -> None:
        """Set the numbers of the step that begins. The host does not wait for the device."""
        if not (math.isfinite(numbers.largest_loss) and math.isfinite(numbers.largest_norm)):
            raise ValueError(f"the limits of a step must be finite numbers: {numbers}")
        self.host = numbers
        values = torch.tensor([*astuple(numbers), 1.0 / numbers.scale], dtype=torch.float64)
        # From pageable memory the copy would wait for all that the device has to do.
        self._all.copy_(values.pin_memory() if self._all.is_cuda else values, non_blocking=True)
