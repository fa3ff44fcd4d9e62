"""An optimizer rule from outside the package: Signum (Bernstein et al., arXiv 1802.04434).

Signum keeps one tensor per parameter where AdamW keeps two, and moves every element by the same amount:

    m      = beta1 * m + (1 - beta1) * g
    master = master - lr * (sign(m) + weight_decay * master)
"""

from collections.abc import Mapping

import torch

from megatron_port.core.dist.record import ParameterRecord
from megatron_port.core.optim.rules import ElementwiseRule, UpdateSettings


class Signum(ElementwiseRule):
    """Reads ``optimizer.beta1`` and ``weight_decay``; ``beta2`` and ``eps`` are not used."""

    def kinds(self, record: ParameterRecord) -> tuple[str, ...]:
        """Return the momentum alone."""
        return ("exp_avg",)

    def update_(
        self, master: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], settings: UpdateSettings
    ) -> None:
        """Update a range of a parameter and its momentum in place."""
        momentum = state["exp_avg"].lerp_(gradient, 1.0 - settings.beta1)
        master.mul_(1.0 - settings.lr * settings.weight_decay)
        master.sub_(momentum.sign(), alpha=settings.lr)


SIGNUM = Signum()
