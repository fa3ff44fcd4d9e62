"""Labels further ahead than the next token, and which of them count (multi-token prediction).

Position i of a sample has token t_i and label t_(i+1). At depth k it reads token t_(i+k) and predicts the label of
position i + k. Depth 0 is the model itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F


def tokens_ahead(labels: torch.Tensor, depth: int) -> torch.Tensor:
    """Return the tokens that depth ``depth`` (from 1) reads, int64 [batch, seq]; 0 where there is none.

    ``labels``: of the model, int64 [batch, seq]; those that do not count are tokens as well.
    """
    return labels_ahead(labels, depth - 1)


def labels_ahead(labels: torch.Tensor, depth: int) -> torch.Tensor:
    """Return the labels of depth ``depth``, int64 [batch, seq]; 0 where the sample has ended."""
    return F.pad(labels[:, depth:], (0, depth))


def counted_ahead(
    depth: int, shape: tuple[int, int], *, mask: torch.Tensor | None, starts: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor:
    """Return 1 where a label of depth ``depth`` counts, else 0: float32 [batch, seq].

    It counts where the label of that many positions on counts, in the same sample and the same document: a position
    reads no token of another document, as its attention does not. So depth 0 counts what the model does.

    Args:
        shape: (batch, seq).
        mask: which of the model's labels count; None: all.
        starts: where the document of each position starts; None: a sample is one document.
    """
    found = torch.ones(shape, device=device) if mask is None else mask.to(device)
    found = found[:, depth:]
    if starts is not None:
        found = found * (starts[:, depth:] == starts[:, : shape[1] - depth]).to(found.dtype)
    return F.pad(found, (0, depth))


@dataclass(frozen=True)
class LookAhead:
    """What each depth of multi-token prediction, from 1 on, reads and predicts at some positions of the samples."""

    tokens: torch.Tensor
    """int64 [depths, batch, positions]; :func:`tokens_ahead`."""
    labels: torch.Tensor
    """int64, the same shape; :func:`labels_ahead`."""
    counted: torch.Tensor
    """float32, the same shape; :func:`counted_ahead`."""

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> LookAhead:
        """Return the same with each tensor changed."""
        return LookAhead(change(self.tokens), change(self.labels), change(self.counted))


def look_ahead(
    labels: torch.Tensor, mask: torch.Tensor | None, starts: torch.Tensor | None, depths: int
) -> LookAhead:
    """Return what ``depths`` depths read and predict at all positions of whole samples; arguments as in
    :func:`counted_ahead`."""
    shape, numbers = (labels.shape[0], labels.shape[1]), range(1, depths + 1)
    return LookAhead(
        torch.stack([tokens_ahead(labels, depth) for depth in numbers]),
        torch.stack([labels_ahead(labels, depth) for depth in numbers]),
        torch.stack([
            counted_ahead(depth, shape, mask=mask, starts=starts, device=labels.device) for depth in numbers
        ]),
    )
