"""Libraries that move rows of tokens between the ranks that share a layer's experts, in place of torch.

One manifest states what a forward pass of a layer exchanges; a transport made from it moves the rows to their experts,
the results back, and in the backward pass the gradients of both. Each row is a token's copy for one expert and travels
by itself: nothing is added up on the way, so results have the bits that torch's all-to-all gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

LARGEST_KEY = 2**24
"""Integers up to this one are exact in float32."""


@dataclass(frozen=True)
class Manifest:
    """Rows that this rank sends to each rank of the group and receives from it in a forward pass of a layer.

    ``counts`` int64 [E], on the device: rows for each expert of the layer; the rows are sorted by expert. ``most``:
    rows that any rank can send, alike on all.
    """

    group: Any
    rank: int
    sent: tuple[int, ...]
    received: tuple[int, ...]
    counts: torch.Tensor
    most: int

    def expert_of_row(self) -> torch.Tensor:
        """Return the expert of each row that is sent, int64 [rows, 1]."""
        experts = torch.arange(len(self.counts), device=self.counts.device)
        return torch.repeat_interleave(experts, self.counts, output_size=sum(self.sent)).unsqueeze(1)

    def keys(self) -> torch.Tensor:
        """Return numbers float32 [rows, 1] that are larger for rows of later ranks, and of a rank for later rows: a
        library carries them with the rows, as weights, and :func:`arrangement` puts what arrives in order by them.

        Raises:
            ValueError: there are more rows than float32 can number.
        """
        if len(self.sent) * self.most > LARGEST_KEY:
            raise ValueError(
                f"{len(self.sent)} ranks of {self.most} rows are more than {LARGEST_KEY}, which "
                'backend.experts_exchange deepep and mori can keep apart; lower batch.micro_batch_size, or use "torch"'
            )
        rows = torch.arange(sum(self.sent), device=self.counts.device)
        return (rows + self.rank * self.most).to(torch.float32).unsqueeze(1)


def arrangement(keys: torch.Tensor, manifest: Manifest) -> torch.Tensor:
    """Return where in what arrived the rows are in the order of an all-to-all, by rank and place: int64 [received].

    Raises:
        RuntimeError: another number of rows arrived than was announced.
    """
    if len(keys) != sum(manifest.received):
        raise RuntimeError(
            f"{len(keys)} rows arrived in an exchange of experts, and {sum(manifest.received)} were announced; use "
            'backend.experts_exchange = "torch"'
        )
    return keys.flatten().argsort()


@dataclass(frozen=True)
class Arriving:
    """Rows on their way: the memory for them, undefined until ``wait`` returns them."""

    memory: torch.Tensor
    wait: Callable[[], torch.Tensor]


class RowTransport(Protocol):
    """Moves the rows of one forward pass of a layer, and their gradients; one exchange at a time."""

    def start(self, rows: torch.Tensor, *, to_experts: bool) -> Arriving:
        """Start to exchange contiguous rows [sent, h] to the ranks of their experts; or [received, h] back."""

    def arranged(self) -> torch.Tensor | None:
        """Return :func:`arrangement` of what has arrived first, of which all further exchanges keep the order; None: it
        comes in that of an all-to-all."""


RowExchange = Callable[[Manifest], RowTransport]
"""Provider of ``backend.experts_exchange``."""
