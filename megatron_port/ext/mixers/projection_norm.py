"""RMSNorm over the features of all heads, of which each tensor-parallel rank has some."""

from __future__ import annotations

from typing import Any

import torch

from megatron_port.core.dist.collectives import Group, all_reduce_sum
from megatron_port.core.layers.fused import FirstOrderFunction, first_order
from megatron_port.core.model.build import BuildContext
from megatron_port.core.model.layers import Norm
from megatron_port.core.model.spec import NormSpec

# RMSNorm over features of which each tensor-parallel rank has some: one sum over ranks in each direction.

class _SplitRMSNorm(FirstOrderFunction):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, count: int, group: Group
    ) -> torch.Tensor:
        wide = _wide(x)
        mean = all_reduce_sum(wide.square().sum(-1, keepdim=True), group) / count
        rstd = torch.rsqrt(mean + eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.count, ctx.group = count, group
        return (wide * rstd * _wide(weight)).to(x.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        x, weight, rstd = ctx.saved_tensors
        normed, grad = _wide(x) * rstd, _wide(grad)
        scaled = grad * _wide(weight)
        # The mean is of all ranks' features, so the gradient of each rank's outputs reaches every rank's features.
        mean = all_reduce_sum((scaled * normed).sum(-1, keepdim=True), ctx.group) / ctx.count
        dx = (scaled - normed * mean) * rstd
        return dx.to(x.dtype), (grad * normed).flatten(0, -2).sum(0), None, None, None


def _wide(x: torch.Tensor) -> torch.Tensor:
    """In float32, or float64 where x is."""
    return x if x.dtype == torch.float64 else x.float()


def split_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, count: int, group: Group) -> torch.Tensor:
    """Return x / sqrt(mean(x²) + eps) · weight for this rank's features x [..., n], weight [n].

    ``count``: features of all ranks of the group together. Ranks may hold some alike, each with its own part of the
    gradient of what they hold; every copy is then counted, in ``count`` too.
    """
    out: torch.Tensor = _SplitRMSNorm.apply(x, weight, eps, count, group)
    return out


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
