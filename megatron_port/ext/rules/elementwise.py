"""Rules that update each element by itself: stochastic gradient descent with momentum, Adagrad.

Arithmetic is in the master's dtype, in torch's ops; of one element it is the same whatever range it is in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from megatron_port.core.config.optimizer import AdagradOptions, SGDOptions
from megatron_port.core.config.schema import OptimizerConfig
from megatron_port.core.dist.record import ParameterRecord
from megatron_port.core.optim.rules import ElementwiseRule, UpdateSettings

MOMENTUM = "momentum_buffer"
"""Kind of a momentum, as torch.optim calls it."""


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


@dataclass(frozen=True)
class Adagrad(ElementwiseRule):
    """Adagrad (Duchi et al., 2011), by the formula of torch.optim.Adagrad: weight decay is added to the gradient.

    With momentum, ``m = momentum m + (1 - momentum) g / (√sum + eps)`` is the update, as in the runs that SM3's paper
    (arXiv 1901.11150) compares with.
    """

    options: AdagradOptions = field(default_factory=AdagradOptions)

    def configured(self, config: OptimizerConfig) -> Adagrad:
        """Return the rule with ``[optimizer.adagrad]``."""
        return Adagrad(config.adagrad)

    def kinds(self, record: ParameterRecord) -> tuple[str, ...]:
        """Return the sum of squared gradients, for every parameter, and the mean of updates, if there is one."""
        return ("sum", "exp_avg") if self.options.momentum else ("sum",)

    def update_(
        self, master: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], settings: UpdateSettings
    ) -> None:
        options, total = self.options, state["sum"]
        if settings.weight_decay:
            gradient.add_(master, alpha=settings.weight_decay)
        if options.initial_accumulator and settings.step == 1:
            total.fill_(options.initial_accumulator)
        root = total.addcmul_(gradient, gradient).sqrt().add_(settings.eps)
        if options.momentum:
            mean = state["exp_avg"].lerp_(gradient.div_(root), 1.0 - options.momentum)
            master.sub_(mean, alpha=settings.lr)
        else:
            master.addcdiv_(gradient, root, value=-settings.lr)


MOMENTUM_SGD, ADAGRAD = SGD(), Adagrad()
