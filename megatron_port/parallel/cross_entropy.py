"""Cross-entropy over a split vocabulary; the logits are never gathered.

Per token: the maximum over ranks, then one sum of (Σ exp(x - max), x[target])
over ranks. The statistics and the loss are float32 for half-precision logits
(float64 for float64). Padded columns take no part: they are masked to -inf, so
they add nothing to the sum and receive no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_port.parallel.collectives import Group


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, offset: int, extent: int, group: Group
    ) -> torch.Tensor:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        x = logits.to(wide, copy=True)
        if extent < x.shape[-1]:
            x[..., extent:] = float("-inf")
        highest = x.amax(dim=-1)
        if group is not None:
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        x.sub_(highest.unsqueeze(-1))
        local = labels - offset
        outside = (local < 0) | (local >= extent)
        index = local.masked_fill(outside, 0).unsqueeze(-1)
        target = x.gather(-1, index).squeeze(-1).masked_fill_(outside, 0.0)
        x.exp_()
        sums = torch.stack((x.sum(dim=-1), target))
        if group is not None:
            dist.all_reduce(sums, group=group)
        total, target = sums[0], sums[1]
        x.div_(total.unsqueeze(-1))
        ctx.save_for_backward(x, index, outside)
        ctx.dtype = logits.dtype
        return total.log() - target

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:  # type: ignore[override]
        softmax, index, outside = ctx.saved_tensors
        out = softmax * grad.unsqueeze(-1)
        out.scatter_add_(-1, index, -(grad.masked_fill(outside, 0.0)).unsqueeze(-1))
        return out.to(ctx.dtype), None, None, None, None


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, *, offset: int, extent: int, group: Group
) -> torch.Tensor:
    """Loss of each token, in nats.

    ``logits`` [seq, batch, padded_vocab/tp], ``labels`` int64 [seq, batch] (global ids); this rank's columns are the
    ids [offset, offset + extent), the rest is padding. Returns float32 (float64 for float64 logits) [seq, batch].
    """
    return _VocabParallelCrossEntropy.apply(logits, labels, offset, extent, group)
