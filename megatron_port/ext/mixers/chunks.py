"""Attention within chunks of positions (Llama 4), which a mask says as it says documents: by each query's first key."""

from __future__ import annotations

import torch


def chunk_starts(documents: torch.Tensor | None, rows: int, x: torch.Tensor, chunk: int) -> torch.Tensor:
    """Return the first key that each of ``rows`` queries sees within its chunk and its document, int32 [batch, rows].

    ``documents``: where these start, or None; ``x``: [positions, batch, ...].
    """
    at = torch.arange(rows, dtype=torch.int32, device=x.device)
    first = (at - at % chunk).expand(x.shape[1], rows)
    return first.contiguous() if documents is None else torch.maximum(first, documents.to(torch.int32))
