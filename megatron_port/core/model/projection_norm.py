"""RMSNorm over the features of all heads, of which each tensor-parallel rank has some."""

from __future__ import annotations

import torch

from megatron_port.core.layers.norm import split_rms_norm
from megatron_port.core.model.build import BuildContext
from megatron_port.core.model.norm import Norm
from megatron_port.core.model.spec import NormSpec


class ProjectionNorm(Norm):
    """RMSNorm over all heads of queries, or of keys, at once: [seq, batch, groups/tp, heads, d] → same shape.

    Each tensor-parallel rank has the weights of its heads, and the mean is over the heads of all ranks. Keys that
    several ranks hold are in the mean as often as they are held, so it is the same.
    """

    def __init__(self, layer: str, spec: NormSpec, build: BuildContext) -> None:
        super().__init__(layer, spec, build)
        self.group, self.ranks = build.ctx.over("tp"), build.ctx.size("tp")

    def weights(self, features: int) -> torch.Tensor:
        """Return the weights of this rank's ``features``. (One process that rounds as ranks do has copies of keys.)"""
        return self.weight

    def _run(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        flat = x.flatten(2)
        weight = self.gain(self.weights(flat.shape[-1]))
        if self.ranks == 1:
            return self._norm(flat, None, weight, None, self.eps)[0].view_as(x), x
        count = flat.shape[-1] * self.ranks
        return split_rms_norm(flat, weight, self.eps, count=count, group=self.group).view_as(x), x
