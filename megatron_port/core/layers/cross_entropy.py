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

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_port.core.dist.collectives import Group
from megatron_port.core.layers.fused import FirstOrderFunction, first_order

_CHUNK = 1 << 22
"""Logits that torch's ops take at a time: 16 MiB as float32, in place of a wide copy of all."""


class CrossEntropyOps(Protocol):
    """Contiguous logits [..., v]; labels int64 [...]; statistics float32 [...], float64 for float64 logits.

    This rank's columns are [0, extent), the ids from ``offset`` on; a label of no such id matches nowhere.
    """

    def statistics(self, logits: Tensor, labels: Tensor, *, offset: int, extent: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return (maximum m, Σ exp(x - m), logit of the label or 0) over this rank's columns; logits are unchanged.

        With no column, or nothing above -inf: (-inf, 0, ...).
        """

    def gradient_(
        self, logits: Tensor, labels: Tensor, maximum: Tensor, total: Tensor, grad: Tensor, *, offset: int, extent: int
    ) -> None:
        """Write (exp(x - maximum) / total - onehot(label)) * grad over the logits, zeros over the other columns."""


class TorchCrossEntropy:
    """Cross-entropy in torch ops, some rows at a time, so that wide copies of half-precision logits stay small."""

    def statistics(self, logits: Tensor, labels: Tensor, *, offset: int, extent: int) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        maximum = torch.full(labels.shape, float("-inf"), dtype=wide, device=logits.device)
        total, target = torch.zeros_like(maximum), torch.zeros_like(maximum)
        if extent == 0:
            return maximum, total, target
        rows, flat = _rows(logits), labels.reshape(-1)
        for part in _parts(rows):
            x = rows[part, :extent].to(wide)
            highest = x.amax(dim=-1)
            # Nothing above -inf: exp(x - 0) is the 0 that exp(x - highest) is not.
            shift = highest.masked_fill(highest == float("-inf"), 0.0)
            index, outside = _columns(flat[part], offset, extent)
            maximum.view(-1)[part] = highest
            total.view(-1)[part] = (x - shift.unsqueeze(-1)).exp_().sum(dim=-1)
            target.view(-1)[part] = x.gather(-1, index).squeeze(-1).masked_fill_(outside, 0.0)
        return maximum, total, target

    def gradient_(
        self, logits: Tensor, labels: Tensor, maximum: Tensor, total: Tensor, grad: Tensor, *, offset: int, extent: int
    ) -> None:
        rows, flat = _rows(logits), labels.reshape(-1)
        rows[:, extent:] = 0.0
        if extent == 0:
            return
        for part in _parts(rows):
            x = rows[part, :extent].to(maximum.dtype)  # the logits themselves where they are as wide
            given = grad.reshape(-1)[part]
            x.sub_(maximum.reshape(-1)[part].unsqueeze(-1)).exp_()
            x.mul_((given / total.reshape(-1)[part]).unsqueeze(-1))
            index, outside = _columns(flat[part], offset, extent)
            x.scatter_add_(-1, index, given.masked_fill(outside, 0.0).neg().unsqueeze(-1))
            if x.dtype != rows.dtype:
                rows[part, :extent] = x


def _rows(logits: Tensor) -> Tensor:
    """[rows, v], the same memory."""
    return logits.view(-1, logits.shape[-1])


def _parts(rows: Tensor) -> Iterator[slice]:
    step = max(1, _CHUNK // rows.shape[1])
    for start in range(0, rows.shape[0], step):
        yield slice(start, start + step)


def _columns(labels: Tensor, offset: int, extent: int) -> tuple[Tensor, Tensor]:
    """(column of each label [rows, 1], 0 where it is none of this rank's; whether that is so [rows])."""
    local = labels - offset
    outside = (local < 0) | (local >= extent)
    return local.masked_fill(outside, 0).unsqueeze(-1), outside


torch_cross_entropy: CrossEntropyOps = TorchCrossEntropy()


TokenLoss = Callable[..., torch.Tensor]
"""The loss of each token, with the arguments and the result of :func:`vocab_parallel_cross_entropy`."""
_SPENT = (
    "cross-entropy: these logits no longer hold what the loss was computed from; its backward pass writes the gradient "
    "over them, so it can run once, and nothing else may change them before"
)


def losses_from(statistics: tuple[Tensor, ...], group: Group, z_loss: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's loss, and its gradient's maximum and total, from each rank's statistics (overwritten)."""
    maximum, total, target = statistics
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
    return loss, maximum, total


class _VocabParallelCrossEntropy(FirstOrderFunction):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, offset: int, extent: int, group: Group,
        ops: CrossEntropyOps, z_loss: float,
    ) -> torch.Tensor:
        statistics = ops.statistics(logits, labels, offset=offset, extent=extent)
        loss, maximum, total = losses_from(statistics, group, z_loss)
        ctx.save_for_backward(logits, labels, maximum, total)
        ctx.offset, ctx.extent, ctx.ops, ctx.spent = offset, extent, ops, False
        return loss

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None, None]:
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
    ids [offset, offset + extent), the rest is padding. A label outside all ranks' ids counts as a logit of 0: its loss
    is to be masked. ``z_loss``: factor of log²Z, added to the loss. Returns float32 (float64 for float64 logits)
    [seq, batch].

    Raises RuntimeError in a second backward pass through the same logits.
    """
    out: torch.Tensor = _VocabParallelCrossEntropy.apply(
        logits.contiguous(), labels.contiguous(), offset, extent, group, ops, z_loss
    )
    return out
