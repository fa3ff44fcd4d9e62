"""Dropout of whole attention probabilities, of which the kernels only ever see parts."""

from __future__ import annotations

import torch

from megatron_port.core.dist.positions import Positions
from megatron_port.core.layers.dropout import DropoutStream


def dropped(
    stream: DropoutStream, probs: torch.Tensor, p: float, *, op: str, head_offset: int,
    positions: Positions | None = None,
) -> torch.Tensor:
    """Drop attention probabilities [batch, heads/tp, queries, keys] of all keys of the sequence.

    ``positions``: of the queries (None: from 0 on).
    """
    if p == 0.0 or not stream.enabled:
        return probs
    positions = positions or Positions.contiguous(probs.shape[2])
    return stream.probability_dropout(p, op=op, head_offset=head_offset, positions=positions).drop(probs)
