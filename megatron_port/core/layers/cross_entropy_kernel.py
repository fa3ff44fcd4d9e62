"""The two steps of cross-entropy that have providers: torch's ops and the project's own kernels.

What happens between them, over the ranks, is in ``layers.cross_entropy``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from megatron_port.ext.kernels.ops import cross_entropy as own

_CHUNK = 1 << 22
"""Logits that torch's ops take at a time: 16 MiB as float32, in place of a wide copy of all."""


class CrossEntropyOps(Protocol):
    """Contiguous logits [..., v]; labels int64 [...]; statistics float32 [...], float64 for float64 logits.

    This rank's columns are [0, extent), the ids from ``offset`` on; a label of no such id matches nowhere.
    """

    def statistics(
        self, logits: Tensor, labels: Tensor, *, offset: int, extent: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (maximum m, Σ exp(x - m), logit of the label or 0) over this rank's columns; logits are unchanged.

        With no column, or nothing above -inf: (-inf, 0, ...).
        """

    def gradient_(
        self, logits: Tensor, labels: Tensor, maximum: Tensor, total: Tensor, grad: Tensor, *, offset: int, extent: int
    ) -> None:
        """Write (exp(x - maximum) / total - onehot(label)) * grad over the logits, zeros over the other columns."""


class OwnCrossEntropy:
    """Cross-entropy through ``backend.ops``; ``kernels.load`` must have run."""

    def statistics(
        self, logits: Tensor, labels: Tensor, *, offset: int, extent: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        return own.statistics(logits, labels, offset=offset, extent=extent)

    def gradient_(
        self, logits: Tensor, labels: Tensor, maximum: Tensor, total: Tensor, grad: Tensor, *, offset: int, extent: int
    ) -> None:
        own.gradient_(logits, labels, maximum, total, grad, offset=offset, extent=extent)


class TorchCrossEntropy:
    """Cross-entropy in torch ops, some rows at a time, so that wide copies of half-precision logits stay small."""

    def statistics(
        self, logits: Tensor, labels: Tensor, *, offset: int, extent: int
    ) -> tuple[Tensor, Tensor, Tensor]:
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
own_cross_entropy: CrossEntropyOps = OwnCrossEntropy()
