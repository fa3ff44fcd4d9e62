"""Keys and values of the tokens so far, for generation: a token then costs one position, not the whole context.

A :class:`KeyValueCache` belongs to one batch and serves all layers of a stage. Layers find the one in use in the
:class:`CacheSlot` that is handed down with the ``BuildContext``; it is empty while training, which pays one attribute
test a layer. Sequences may have different lengths: prompts are padded on the right, each has its own position, and what
lies beyond it is overwritten before it is ever looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F


class KeyValueCache:
    """Cache of one batch's keys and values.

    Run the stage on the prompts; then, for each new token, call ``at`` and run the stage on [batch, 1] tokens.

    Memory: 2 · layers · batch · groups · capacity · head size elements on each rank.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        """Positions that there is room for."""
        self.positions: torch.Tensor | None = None
        """int64 [batch]: where the token at hand stands; None while prompts are read."""
        self._visible: torch.Tensor | None = None
        self._layers: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def length(self) -> int:
        """Positions that the current token attends to in the longest sequence, itself included."""
        return 0 if self._visible is None else self._visible.shape[-1]

    def at(self, positions: Sequence[int], device: torch.device) -> None:
        """Set the positions (from 0) of the next pass, which has one token per sequence."""
        last = max(positions)
        if last >= self.capacity:
            raise ValueError(f"position {last} of a cache of {self.capacity}")
        self.positions = torch.tensor(list(positions), dtype=torch.int64, device=device)
        seen = torch.arange(last + 1, device=device)
        self._visible = (seen <= self.positions[:, None])[:, None, None, :]

    def store(self, layer: str, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store keys and values [seq, batch, groups, d] of the prompts."""
        seq, batch, groups, size = k.shape
        kept = []
        for x in (k, v):
            room = x.new_zeros(batch, groups, self.capacity, size)  # not empty: 0 times what lies there must be 0
            room[:, :, :seq] = x.permute(1, 2, 0, 3)
            kept.append(room)
        self._layers[layer] = (kept[0], kept[1])

    def attend(self, layer: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Compute the attention of one token per sequence over itself and all tokens before it.

        q [1, batch, heads, d], k and v [1, batch, groups, d] → [1, batch, heads · d]. The query heads of a group are
        the rows of one product, so keys and values are never repeated.
        """
        keys, values = self._layers[layer]
        assert self.positions is not None and self._visible is not None
        _, batch, heads, size = q.shape
        groups, row = k.shape[2], torch.arange(q.shape[1], device=q.device)
        keys[row, :, self.positions] = k[0]
        values[row, :, self.positions] = v[0]
        out = F.scaled_dot_product_attention(
            q.reshape(batch, groups, heads // groups, size), keys[:, :, : self.length], values[:, :, : self.length],
            attn_mask=self._visible,
        )
        return out.reshape(1, batch, heads * size)


class CacheSlot:
    """Slot in which the layers of a stage find the cache in use."""

    def __init__(self) -> None:
        self.now: KeyValueCache | None = None

    @contextmanager
    def using(self, cache: KeyValueCache) -> Iterator[None]:
        """Let the passes of the stage inside the ``with`` block read and fill ``cache``."""
        self.now = cache
        try:
            yield
        finally:
            self.now = None
