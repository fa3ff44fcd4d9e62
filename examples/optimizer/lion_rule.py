"""An optimizer rule from outside the package: Lion (Chen et al., arXiv 2302.06675).

Lion keeps one tensor per parameter where AdamW keeps two, and moves every element by the same amount:

    u      = sign(beta1 * m + (1 - beta1) * g)
    master = master - lr * (u + weight_decay * master)
    m      = beta2 * m + (1 - beta2) * g
"""

from collections.abc import Mapping

import torch

from megatron_port.optim.rules import ElementwiseRule, UpdateSettings
from megatron_port.parallel.record import ParameterRecord


class Lion(ElementwiseRule):
    """Reads ``optimizer.beta1`` and ``beta2`` (the paper: 0.9 and 0.99) and ``weight_decay``; ``eps`` is not used."""

    def kinds(self, record: ParameterRecord) -> tuple[str, ...]:
        """Return the momentum alone."""
        return ("exp_avg",)

    def update_(
        self, master: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], settings: UpdateSettings
    ) -> None:
        """Update a range of a parameter and its momentum in place."""
        momentum = state["exp_avg"]
        direction = torch.lerp(gradient, momentum, settings.beta1).sign_()
        master.mul_(1.0 - settings.lr * settings.weight_decay)
        master.sub_(direction, alpha=settings.lr)
        momentum.lerp_(gradient, 1.0 - settings.beta2)


LION = Lion()
