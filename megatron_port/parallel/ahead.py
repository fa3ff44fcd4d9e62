"""Labels further ahead than the next token, and which of them count (multi-token prediction).

Position i of a sample has token t_i and label t_(i+1). At depth k it reads token t_(i+k) and predicts the label of
position i + k. Depth 0 is the model itself.
"""

from __future__ import annotations

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
