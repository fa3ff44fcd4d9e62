"""LayerNorm (Ba et al., arXiv 1607.06450) and RMSNorm (Zhang & Sennrich, arXiv 1910.07467)."""

from __future__ import annotations

import torch
from torch import nn

from megatron_port.model.build import BuildContext
from megatron_port.parallel.record import InitSpec, attach, split_record


class Norm(nn.Module):
    """Over the last dimension of [seq(/tp), batch, hidden].

    Replicated over tp. Under sequence parallelism a rank sees only its tokens,
    so the gradients are partial sums (``partial_grad_over_tp`` in the records).
    """

    def __init__(self, name: str, build: BuildContext) -> None:
        super().__init__()
        cfg = build.model
        self.kind, self.eps, self.providers = cfg.normalization, cfg.norm_epsilon, build.providers

        def parameter(suffix: str, kind: str) -> nn.Parameter:
            record = split_record(
                f"{name}.{suffix}", (cfg.hidden_size,), init=InitSpec(kind), decay=False,
                partial_grad_over_tp=build.sequence_parallel,
            )
            empty = torch.empty(cfg.hidden_size, dtype=build.dtype, device=build.ctx.device)
            return attach(nn.Parameter(empty), record)

        self.weight = parameter("weight", "ones")
        self.bias = parameter("bias", "zeros") if self.kind == "layernorm" and cfg.add_bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._run(x, None)[0]

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, x + residual), in one pass where the provider can."""
        return self._run(x, residual)

    def _run(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        norm = self.providers.rms_norm if self.kind == "rmsnorm" else self.providers.layer_norm
        return norm(x, residual, self.weight, self.bias, self.eps)
