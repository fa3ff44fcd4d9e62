"""Cross-entropy over a split vocabulary; the logits are never gathered.

Per token: the maximum over ranks, then one sum of (Σ exp(x - max), x[target])
over ranks. The statistics and the loss are float32 for half-precision logits
(float64 for float64). Padded columns take no part: they add nothing to the sum
and receive no gradient.

z-loss adds ``z_loss`` log²Z to a token's loss (Z = Σ exp x; Chowdhery et al., arXiv 2204.02311, section 5). log Z is
known, and its gradient is softmax, so the gradient is that of cross-entropy with softmax times 1 + 2 ``z_loss`` log Z:
the same kernels, given Z divided by that.

The logits are the largest activation and nobody needs them after the loss, so
the gradient is written over them: no copy of them is ever made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_port.core.dist.collectives import Group
from megatron_port.core.layers.cross_entropy_kernel import CrossEntropyOps, torch_cross_entropy
from megatron_port.core.layers.direct import FirstOrderFunction, first_order

TokenLoss = Callable[..., torch.Tensor]
"""The loss of each token, with the arguments and the result of :func:`vocab_parallel_cross_entropy`."""
_SPENT = (
    "cross-entropy: these logits no longer hold what the loss was computed from; its backward pass writes the gradient "
    "over them, so it can run once, and nothing else may change them before"
)


class _VocabParallelCrossEntropy(FirstOrderFunction):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, offset: int, extent: int, group: Group,
        ops: CrossEntropyOps, z_loss: float,
    ) -> torch.Tensor:
        maximum, total, target = ops.statistics(logits, labels, offset=offset, extent=extent)
        if group is not None:
            own = maximum.clone()
            dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
            sums = torch.stack((total.mul_(own.sub_(maximum).exp_()), target))
            dist.all_reduce(sums, group=group)
            total, target = sums.unbind()
        loss = total.log() + (maximum - target)
        if z_loss:
            log_z = total.log() + maximum
            loss += z_loss * log_z.square()
            total = total / (1.0 + 2.0 * z_loss * log_z)
        ctx.save_for_backward(logits, labels, maximum, total)
        ctx.offset, ctx.extent, ctx.ops, ctx.spent = offset, extent, ops, False
        return loss

    @staticmethod
    @first_order
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None, None, None, None]:
        if ctx.spent:
            raise RuntimeError(_SPENT)
        try:
            logits, labels, maximum, total = ctx.saved_tensors
        except RuntimeError as error:
            if "modified by an inplace operation" in str(error):
                raise RuntimeError(_SPENT) from error
            raise
        ctx.spent = True
        out = logits.detach()
        ctx.ops.gradient_(out, labels, maximum, total, grad.contiguous(), offset=ctx.offset, extent=ctx.extent)
        # Kernels do not count versions: without this a second loss of the same logits would not see the change.
        torch.autograd.graph.increment_version(out)
        return out, None, None, None, None, None, None


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, *, offset: int, extent: int, group: Group,
    ops: CrossEntropyOps = torch_cross_entropy, z_loss: float = 0.0,
) -> torch.Tensor:
    """Return the loss of each token in nats. A backward pass overwrites ``logits``; otherwise they are unchanged.

    ``logits`` [seq, batch, padded_vocab/tp], ``labels`` int64 [seq, batch] (global ids); this rank's columns are the
    ids [offset, offset + extent), the rest is padding. A label that is no rank's id counts as a logit of 0: its loss
    is to be masked. ``z_loss``: factor of log²Z, added to the loss. Returns float32 (float64 for float64 logits)
    [seq, batch].

    Raises RuntimeError in a second backward pass through the same logits.
    """
    out: torch.Tensor = _VocabParallelCrossEntropy.apply(
        logits.contiguous(), labels.contiguous(), offset, extent, group, ops, z_loss
    )
    return out
