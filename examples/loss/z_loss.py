"""A loss from outside the package: cross-entropy plus z-loss (Chowdhery et al., arXiv 2204.02311, section 5).

    loss = log Z - x[label] + 1e-4 * (log Z)^2,   Z = sum over the vocabulary of exp(x)

The second term keeps log Z near 0. The vocabulary is split over the tensor-parallel ranks, so Z and the label's logit
are sums over them; ``reduce_from_tp`` is such a sum, with its gradient, and autograd does the rest.
"""

import torch
import torch.distributed as dist

from megatron_port.core.dist.collectives import reduce_from_tp
from megatron_port.core.registry import LOSSES

COEFFICIENT = 1e-4


def z_loss(
    logits: torch.Tensor, labels: torch.Tensor, *, offset: int, extent: int, group: dist.ProcessGroup | None,
    ops: object,
) -> torch.Tensor:
    """Return the loss of each token [seq, batch], float32 (float64 for float64 logits).

    Args:
        logits: [seq, batch, columns]: this rank's part of the vocabulary, the ids from ``offset`` on.
        labels: int64 [seq, batch], ids of the whole vocabulary.
        offset: id of the first column.
        extent: columns that are part of the vocabulary, at least one here; those behind are padding.
        group: the ranks that share the vocabulary; None: this rank has all of it.
        ops: fused kernels of the cross-entropy, not used here.
    """
    x = logits[..., :extent]
    x = x if x.dtype == torch.float64 else x.float()
    highest = x.detach().amax(dim=-1)
    if group is not None:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    z = reduce_from_tp((x - highest.unsqueeze(-1)).exp().sum(dim=-1), group)
    log_z = z.log() + highest
    local = labels - offset
    elsewhere = (local < 0) | (local >= extent)
    own = x.gather(-1, local.masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
    target = reduce_from_tp(own.masked_fill(elsewhere, 0.0), group)
    return log_z - target + COEFFICIENT * log_z.square()


LOSSES.add("z_loss", z_loss)
