"""Rules that update each element by itself: Lion, stochastic gradient descent with momentum, Adagrad.

Arithmetic is in the master's dtype, in torch's ops; of one element it is the same whatever range it is in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from megatron_port.config.rule_options import SGDOptions
from megatron_port.config.schema import OptimizerConfig
from megatron_port.optim.rules import ElementwiseRule, UpdateSettings
from megatron_port.parallel.record import ParameterRecord

MOMENTUM = "momentum_buffer"
"""Kind of a momentum, as torch.optim calls it."""


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


@dataclass(frozen=True)
class SGD(ElementwiseRule):
    """Stochastic gradient descent with momentum, by the formula of torch.optim.SGD: weight decay is added to the
    gradient. ``optimizer.lr`` is some hundred times AdamW's."""

    options: SGDOptions = field(default_factory=SGDOptions)

    def configured(self, config: OptimizerConfig) -> SGD:
        """Return the rule with ``[optimizer.sgd]``."""
        return SGD(config.sgd)

    def kinds(self, record: ParameterRecord) -> tuple[str, ...]:
        """Return the momentum, if there is one."""
        return (MOMENTUM,) if self.options.momentum else ()

    def update_(
        self, master: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], settings: UpdateSettings
    ) -> None:
        options = self.options
        if settings.weight_decay:
            gradient.add_(master, alpha=settings.weight_decay)
        if options.momentum:
            # torch's first momentum is the gradient itself, without dampening.
            damped = 1.0 - options.dampening if settings.step > 1 else 1.0
            momentum = state[MOMENTUM].mul_(options.momentum).add_(gradient, alpha=damped)
            gradient = gradient.add_(momentum, alpha=options.momentum) if options.nesterov else momentum
        master.sub_(gradient, alpha=settings.lr)


class Adagrad(ElementwiseRule):
    """Adagrad (Duchi et al., 2011), by the formula of torch.optim.Adagrad: weight decay is added to the gradient."""

    def kinds(self, record: ParameterRecord) -> tuple[str, ...]:
        """Return the sum of squared gradients, for every parameter."""
        return ("sum",)

    def update_(
        self, master: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], settings: UpdateSettings
    ) -> None:
        if settings.weight_decay:
            gradient.add_(master, alpha=settings.weight_decay)
        total = state["sum"].addcmul_(gradient, gradient)
        master.addcdiv_(gradient, total.sqrt().add_(settings.eps), value=-settings.lr)


LION, MOMENTUM_SGD, ADAGRAD = Lion(), SGD(), Adagrad()
