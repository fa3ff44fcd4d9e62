"""Muon: momentum made orthogonal, matrix by matrix; AdamW for what is no matrix of a layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from megatron_port.core.config.rule_options import MuonOptions
from megatron_port.core.config.schema import OptimizerConfig
from megatron_port.core.dist.record import ParameterRecord
from megatron_port.core.optim.rules import AdamW, UpdateSettings
from megatron_port.ext.rules.elementwise import MOMENTUM
from megatron_port.ext.rules.matrices import MatrixRule

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration (Jordan et al., 2024): the largest slope at 0 with which it stays bounded."""
SMALLEST_NORM = 1e-7
OF_LAYERS = ("layers.", "mtp.")
"""Beginnings of the names of what is within layers: neither embeddings nor the head."""


@dataclass(frozen=True)
class Muon(MatrixRule):
    """Muon (Jordan et al., 2024; Liu et al., arXiv 2502.16982) by the formula of torch.optim.Muon.

    Its matrices are those of linears within layers, adapters and routers among them: each expert's, gate and up apart,
    and of a fused projection queries, keys and values apart. Embeddings, head, biases and norms are AdamW's.
    """

    options: MuonOptions = field(default_factory=MuonOptions)

    def configured(self, config: OptimizerConfig) -> Muon:
        """Return the rule with ``[optimizer.muon]``."""
        return Muon(config.muon)

    def takes(self, record: ParameterRecord) -> bool:
        """Return whether a parameter is a layer's matrix, or a stack of them."""
        return record.decay and len(record.shape) > 1 and record.name.startswith(OF_LAYERS)

    def kinds(self, record: ParameterRecord) -> tuple[str, ...]:
        """Return the momentum of a matrix, AdamW's moments of what is none."""
        return (MOMENTUM,) if self.takes(record) else AdamW.KINDS

    def update_(
        self, master: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], settings: UpdateSettings
    ) -> None:
        adamw_(master, gradient, state, settings)

    def prepare_(
        self, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], settings: UpdateSettings
    ) -> None:
        momentum = state[MOMENTUM].lerp_(gradient, 1.0 - self.options.momentum)
        if self.options.nesterov:
            gradient.lerp_(momentum, self.options.momentum)
        else:
            gradient.copy_(momentum)

    def transform(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the matrix with its singular values brought near 1."""
        return orthogonalized(matrix, self.options.ns_steps)

    def factor(self, rows: int, columns: int) -> float:
        """Return the factor of ``optimizer.lr`` for a matrix of this shape."""
        if self.options.adjust_lr == "original":
            return self.options.lr_factor * math.sqrt(max(1.0, rows / columns))
        return self.options.lr_factor * 0.2 * math.sqrt(max(rows, columns))

    def apply_(self, master: torch.Tensor, update: torch.Tensor, factor: float, settings: UpdateSettings) -> None:
        decay = settings.lr * self.options.lr_factor * settings.weight_decay
        master.mul_(1.0 - decay).sub_(update, alpha=settings.lr * factor)


def orthogonalized(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """Return U V^T of ``matrix`` = U S V^T, roughly (singular values between 0.7 and 1.2), by a Newton-Schulz iteration
    in the matrix's dtype."""
    a, b, c = COEFFICIENTS
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.T


def adamw_(
    master: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], settings: UpdateSettings
) -> None:
    """Update a range by AdamW, as torch.optim.AdamW."""
    s = settings
    first = state["exp_avg"].lerp_(gradient, 1.0 - s.beta1)
    second = state["exp_avg_sq"].mul_(s.beta2).addcmul_(gradient, gradient, value=1.0 - s.beta2)
    master.mul_(1.0 - s.lr * s.weight_decay)
    root = (second.sqrt() / math.sqrt(1.0 - s.beta2**s.step)).add_(s.eps)
    master.addcdiv_(first, root, value=-s.lr / (1.0 - s.beta1**s.step))


MUON = Muon()
