"""Sums over the positions of a sample, which context-parallel ranks share, and the entropy of split logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_port.core.dist.collectives import Group, all_reduce_sum
from megatron_port.core.layers.fused import FirstOrderFunction, first_order


class _SumOverRanks(FirstOrderFunction):
    """Each rank's loss has a part of what is made of the sum, so the gradients of the ranks' losses are summed too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return all_reduce_sum(x, group)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce_sum(grad, ctx.group), None


def sample_sums(values: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sums over whole samples [batch, …] of values at this rank's positions [batch, seq/cp, …].

    Every rank of ``group`` (context-parallel) has them. Its loss must take its own part alone of what is made of them;
    gradients are then those of all ranks' parts.
    """
    own = values.sum(dim=1)
    if group is None:
        return own
    found: torch.Tensor = _SumOverRanks.apply(own, group)
    return found


class _Entropy(FirstOrderFunction):
    """Keeps a gradient of its own, because the cross-entropy writes its gradient over the logits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, extent: int, group: Group) -> torch.Tensor:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        x = logits[..., :extent].to(wide, copy=True)
        empty = torch.full(x.shape[:-1], float("-inf"), dtype=wide, device=x.device)
        highest = x.amax(dim=-1) if extent else empty
        if group is not None:
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        x -= highest.unsqueeze(-1)
        weights = x.exp()
        sums = torch.stack((weights.sum(dim=-1), (weights * x).sum(dim=-1)))
        total, weighted = all_reduce_sum(sums, group).unbind()
        entropy = total.log() - weighted / total
        # dH/dx = -p (log p + H), and log p = x - log Z.
        weights /= total.unsqueeze(-1)
        x += (entropy - total.log()).unsqueeze(-1)
        ctx.save_for_backward(weights.mul_(x).neg_())
        ctx.columns, ctx.dtype = logits.shape[-1], logits.dtype
        return entropy

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        own = (slope * grad.unsqueeze(-1)).to(ctx.dtype)
        return torch.nn.functional.pad(own, (0, ctx.columns - own.shape[-1])), None, None


def token_entropies(logits: torch.Tensor, *, extent: int, group: Group) -> torch.Tensor:
    """Return the entropy of each prediction in nats, float32 (float64 for float64 logits).

    Args:
        logits: [seq, batch, padded_vocab/tp], of which the first ``extent`` columns are this rank's ids.
        group: tensor-parallel; None: the logits are whole.

    Returns:
        [seq, batch]. Keeps one wide copy of the logits for the backward pass.
    """
    found: torch.Tensor = _Entropy.apply(logits, extent, group)
    return found
