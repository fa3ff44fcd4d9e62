"""Other orders of the same sums on one process: what rounding alone may change.

bf16 and fp16 have no bound that suits every model. What a layout may differ by
is measured instead: the same run on one process with its samples in another
order, in micro-batches of another size, and with every linear's contraction
cut in pieces that are rounded before they are added, as tensor parallelism
cuts it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from megatron_port.model.layers import Head
from megatron_port.parallel.linear import ColumnParallelLinear, RowParallelLinear, linear


@dataclass(frozen=True)
class Reordering:
    """One order. ``micro_batches``: into how many the global batch is cut (as far as it divides)."""

    micro_batches: int
    order_seed: int
    chunks: int
    """Pieces of every split linear's contraction."""

    def micro_batch_size(self, global_batch: int) -> int:
        """Samples of a micro-batch: the largest divisor of the batch up to batch / micro_batches."""
        wanted = max(global_batch // self.micro_batches, 1)
        return max(b for b in range(1, wanted + 1) if global_batch % b == 0)

    def order(self, global_batch: int) -> list[int]:
        """A permutation of the batch's samples."""
        generator = torch.Generator().manual_seed(self.order_seed)
        return torch.randperm(global_batch, generator=generator).tolist()


REORDERINGS = (
    Reordering(8, 0, 1), Reordering(4, 1, 1), Reordering(2, 2, 1), Reordering(1, 3, 1),
    Reordering(4, 4, 2), Reordering(2, 5, 2), Reordering(8, 6, 2), Reordering(4, 7, 4),
)
"""The eight that tolerances are measured with."""


def _row(module: RowParallelLinear, chunks: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        pieces = zip(x.chunk(chunks, -1), module.weight.chunk(chunks, 1))
        parts = [linear(a, w, products=module.products) for a, w in pieces]
        y = sum(parts[1:], parts[0])
        return y if module.bias is None or module.skip_bias else y + module.bias

    return forward


def _column(module: ColumnParallelLinear, chunks: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        weight = module.weight.flatten(0, -2)
        y = torch.cat([linear(x, w, products=module.products) for w in weight.chunk(chunks, 0)], dim=-1)
        return y if module.bias is None or module.skip_bias else y + module.bias.flatten()

    return forward


def _head(module: Head, chunks: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        x = module.norm(x)
        return torch.cat([F.linear(x, w) for w in module.weight.chunk(chunks, 0)], dim=-1)

    return forward


def cut_sums(stage: nn.Module, chunks: int) -> None:
    """Make every split linear (the head too) of a single-process model add ``chunks`` rounded partial sums."""
    for module in stage.modules():
        if isinstance(module, RowParallelLinear):
            module.forward = _row(module, chunks)  # type: ignore[method-assign, assignment]
        elif isinstance(module, ColumnParallelLinear):
            module.forward = _column(module, chunks)  # type: ignore[method-assign, assignment]
        elif isinstance(module, Head):
            module.forward = _head(module, chunks)  # type: ignore[method-assign, assignment]
