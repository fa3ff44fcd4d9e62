"""LayerNorm (Ba et al., arXiv 1607.06450) and RMSNorm (Zhang & Sennrich, arXiv 1910.07467)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatron_port.core.layers import fused
from megatron_port.core.layers.fused import torch_layer_norm, torch_rms_norm
from megatron_port.core.model.build import BuildContext
from megatron_port.core.model.spec import NormSpec


class Norm(nn.Module):
    """Norm over the last dimension of a tensor, e.g. [seq(/tp), batch, hidden].

    The parameters are replicated over tp. Where a rank sees only its tokens (sequence parallelism) or only its heads,
    their gradients are partial sums over tp, and their records are marked partial. Zero-centred ones multiply by
    1 + weight, which is formed in the weight's dtype.
    """

    def __init__(self, layer: str, spec: NormSpec, build: BuildContext) -> None:
        super().__init__()
        self.gradient, self.zero_centered = spec.gradient, spec.zero_centered
        self.kind, self.eps, self.providers = spec.kind, build.model.norm_epsilon, build.providers
        # torch's norms add first, with the same bits.
        self.fuses_add = self._norm not in (torch_layer_norm, torch_rms_norm)
        weight, *bias = (build.divided(p, layer) for p in spec.parameters)
        self.weight: nn.Parameter = weight
        self.bias: nn.Parameter | None = bias[0] if bias else None

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, *, by: fused.Norm | None = None, pair: bool = False
    ) -> Any:
        """Return the norm of x + residual; with ``pair``, (norm of x + residual, x + residual).

        ``by``: what computes it; None: the provider. All ways to a norm lead through here, so that a module's hooks see
        it (``engine.probe``).
        """
        both = self._run(x, residual) if by is None else by(x, residual, self.gain(self.weight), self.bias, self.eps)
        return both if pair else both[0]

    def fork(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (norm of x, x); use the second in place of x, whose gradients are then added in one pass where the
        provider can."""
        both: tuple[torch.Tensor, torch.Tensor] = self(x, pair=True)
        return both

    def add(
        self, x: torch.Tensor, residual: torch.Tensor, *, by: fused.Norm | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (norm of x + residual, x + residual), in one pass where the provider, or ``by``, can."""
        both: tuple[torch.Tensor, torch.Tensor] = self(x, residual, by=by, pair=True)
        return both

    def _run(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return self._norm(x, residual, self.gain(self.weight), self.bias, self.eps)

    def gain(self, weight: torch.Tensor) -> torch.Tensor:
        """Return what normed features are multiplied by."""
        return weight + 1 if self.zero_centered else weight

    @property
    def _norm(self) -> fused.Norm:
        return self.providers.rms_norm if self.kind == "rmsnorm" else self.providers.layer_norm
