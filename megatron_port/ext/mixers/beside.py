"""The module of attention that has a recurrence beside it."""

from __future__ import annotations

import torch

from megatron_port.core.model.attention import SelfAttention
from megatron_port.core.model.build import BuildContext
from megatron_port.ext.mixers.attention_mamba2 import AttentionMamba2Spec
from megatron_port.ext.mixers.recurrent import Recurrent


class AttentionBesideRecurrent(SelfAttention):
    """Sum of self-attention and of a recurrence, [seq(/tp), batch, hidden] → same shape."""

    def __init__(self, layer: str, spec: AttentionMamba2Spec, build: BuildContext) -> None:
        super().__init__(layer, spec, build)
        self.recurrent = Recurrent(layer, spec.recurrent, build)
        self.multiplier = build.model.recurrent.attention_multiplier

    def summed(self, attention: torch.Tensor, recurrent: torch.Tensor) -> torch.Tensor:
        """Return the sum of both results, attention's scaled."""
        return torch.add(recurrent, attention, alpha=self.multiplier)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        recurrent = self.recurrent
        packed = recurrent.packed(x) if recurrent.shared is None else recurrent.project(x)
        return self.summed(super().forward(x), recurrent.output(recurrent.mix(packed)))
