"""Cross-entropy over a split vocabulary: what a rank knows of its columns, and the gradient in the logits' place.

No gradients of their own: ``layers.cross_entropy`` puts them together over the ranks. fp32, fp16 and bf16 logits,
arithmetic in fp32. Bytes: the logits once in forward, once in and once out backward; 28 bytes a row beside them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_port.core.layers.cross_entropy import CrossEntropyOps


def statistics(logits: Tensor, labels: Tensor, *, offset: int, extent: int) -> tuple[Tensor, Tensor, Tensor]:
    """(maximum, total, target), each float32 [...], of contiguous logits [..., v] and labels int64 [...].

    Over the columns [0, extent), the ids from ``offset`` on: the maximum m, Σ exp(x - m), and the logit of the label,
    0 where it is none of these ids. With no live column above -inf, m is -inf and the total 0; NaN or +inf in a row
    make its total NaN.
    """
    out: tuple[Tensor, Tensor, Tensor] = torch.ops.megatron_port.cross_entropy_statistics(
        logits, labels, offset, extent
    )
    return out


def gradient_(
    logits: Tensor, labels: Tensor, maximum: Tensor, total: Tensor, grad: Tensor, *, offset: int, extent: int
) -> None:
    """Write (exp(x - maximum) / total - onehot(label)) * grad over the logits, zeros over columns [extent, v).

    ``maximum`` and ``total`` are those of the whole vocabulary, ``grad`` the losses' gradient: float32 [...].
    """
    torch.ops.megatron_port.cross_entropy_gradient_(logits, labels, maximum, total, grad, offset, extent)


class OwnCrossEntropy:
    """Cross-entropy through ``backend.ops``; ``kernels.load`` must have run."""

    def statistics(
        self, logits: Tensor, labels: Tensor, *, offset: int, extent: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        return statistics(logits, labels, offset=offset, extent=extent)

    def gradient_(
        self, logits: Tensor, labels: Tensor, maximum: Tensor, total: Tensor, grad: Tensor, *, offset: int, extent: int
    ) -> None:
        gradient_(logits, labels, maximum, total, grad, offset=offset, extent=extent)


own_cross_entropy: CrossEntropyOps = OwnCrossEntropy()


def _statistics_shapes(logits: Tensor, labels: Tensor, offset: int, extent: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        labels.new_empty(labels.shape, dtype=torch.float32), labels.new_empty(labels.shape, dtype=torch.float32),
        labels.new_empty(labels.shape, dtype=torch.float32),
    )


def _gradient_shapes(
    logits: Tensor, labels: Tensor, maximum: Tensor, total: Tensor, grad: Tensor, offset: int, extent: int
) -> None:
    return None


def register_cross_entropy() -> None:
    """Shapes of the ops, in torch's registry."""
    torch.library.register_fake("megatron_port::cross_entropy_statistics", _statistics_shapes)
    torch.library.register_fake("megatron_port::cross_entropy_gradient_", _gradient_shapes)
