"""Lion, which own kernels update; here in torch's ops."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_port.core.dist.record import ParameterRecord
from megatron_port.core.optim.rules import ElementwiseRule, UpdateSettings


class Lion(ElementwiseRule):
    """Lion (Chen et al., arXiv 2302.06675): steps of one size, in the direction of the momentum's sign.

    ``u = sign(beta1 m + (1 - beta1) g)``, ``p -= lr (u + weight_decay p)``, ``m = beta2 m + (1 - beta2) g``.
    """

    def kinds(self, record: ParameterRecord) -> tuple[str, ...]:
        """Return the momentum, for every parameter."""
        return ("exp_avg",)

    def update_(
        self, master: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], settings: UpdateSettings
    ) -> None:
        momentum = state["exp_avg"]
        direction = torch.lerp(gradient, momentum, settings.beta1).sign_()
        master.mul_(1.0 - settings.lr * settings.weight_decay).sub_(direction, alpha=settings.lr)
        momentum.lerp_(gradient, 1.0 - settings.beta2)


LION = Lion()
