"""Other orders of the same sums on one process: what rounding alone may change.

bf16 and fp16 have no bound that suits every model. What a layout may differ by
is measured instead: the same run on one process with its samples in another
order, in micro-batches of another size, and with every linear's contraction
cut in random pieces that are rounded before they are added, as tensor
parallelism cuts it in pieces of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megatron_port.core.layers.linear import ColumnParallelLinear, RowParallelLinear, linear
from megatron_port.core.layers.linear_kernels import PLAIN, FewBitLinearKernels, LinearKernels
from megatron_port.core.model.layers import Head


@dataclass(frozen=True)
class Reordering:
    """Order of one process's sums. ``micro_batches``: into how many the global batch is cut (as far as it divides)."""

    micro_batches: int
    order_seed: int
    chunks: int
    """Pieces of every split linear's contraction."""

    def micro_batch_size(self, global_batch: int) -> int:
        """Return the micro-batch size: the largest divisor of the batch up to batch / micro_batches."""
        wanted = max(global_batch // self.micro_batches, 1)
        return max(b for b in range(1, wanted + 1) if global_batch % b == 0)

    def order(self, global_batch: int) -> list[int]:
        """Return a permutation of the batch's samples."""
        generator = torch.Generator().manual_seed(self.order_seed)
        return torch.randperm(global_batch, generator=generator).tolist()


REORDERINGS = (
    Reordering(8, 0, 1), Reordering(4, 1, 1), Reordering(2, 2, 1), Reordering(1, 3, 1),
    Reordering(4, 4, 2), Reordering(2, 5, 2), Reordering(8, 6, 2), Reordering(4, 7, 4),
)
"""The eight that tolerances are measured with."""
ORDERS: tuple[Reordering | None, ...] = (None, *sorted(REORDERINGS, key=lambda r: -r.chunks))
"""One process in its own order and in the eight, those first that change most."""


def _pieces(
    size: int, reordering: Reordering, place: int, device: torch.device, group: int = 1
) -> tuple[torch.Tensor, ...]:
    """Return a random partition of ``range(size)`` into the reordering's pieces, another for every linear; ``group``
    neighbours stay together."""
    generator = torch.Generator().manual_seed(1_000 * reordering.order_seed + place)
    drawn = torch.randperm(size // group, generator=generator).chunk(reordering.chunks)
    return tuple((part[:, None] * group + torch.arange(group)).flatten().to(device) for part in drawn)


def _row(module: RowParallelLinear, reordering: Reordering, place: int) -> Callable[[torch.Tensor], torch.Tensor]:
    # Weights of few bits have a scale for each group, which no piece may cut.
    group = module.kernels.group_size if isinstance(module.kernels, FewBitLinearKernels) else 1
    pieces = _pieces(module.weight.shape[1], reordering, place, module.weight.device, group)

    def forward(x: torch.Tensor) -> torch.Tensor:
        parts = [linear(x[..., piece], module.weight[:, piece], kernels=module.kernels) for piece in pieces]
        y = sum(parts[1:], parts[0])
        return y if module.bias is None or module.skip_bias else y + module.bias

    return forward


def _columns(
    x: torch.Tensor, weight: torch.Tensor, pieces: Sequence[torch.Tensor], kernels: LinearKernels
) -> torch.Tensor:
    """Return x Wᵀ, whose backward pass adds as many input gradients as there are pieces of W's rows."""
    parts = [linear(x, weight[piece], kernels=kernels) for piece in pieces]
    return torch.cat(parts, dim=-1)[..., torch.cat(tuple(pieces)).argsort()]


def _column(module: ColumnParallelLinear, reordering: Reordering, place: int) -> Callable[[torch.Tensor], torch.Tensor]:
    pieces = _pieces(module.weight.shape[:-1].numel(), reordering, place, module.weight.device)

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = _columns(x, module.weight.flatten(0, -2), pieces, module.kernels)
        return y if module.bias is None or module.skip_bias else y + module.bias.flatten()

    return forward


def _head(module: Head, reordering: Reordering, place: int) -> Callable[[torch.Tensor], torch.Tensor]:
    pieces = _pieces(module.weight.shape[0], reordering, place, module.weight.device)

    def logits(y: torch.Tensor) -> torch.Tensor:
        found = _columns(y, module.weight, pieces, PLAIN)
        return module.capped(found if module.bias is None else found + module.bias)

    return logits


def apply_reduction_order(stage: nn.Module, reordering: Reordering) -> None:
    """Make every split linear (the head too) of a single-process model add rounded partial sums of random pieces.

    Random ones, because what rounding does to a run depends on where the sums are cut far more than on the order of
    samples, and is the same at every step: runs that are all cut in the same place would be one measurement.
    """
    if reordering.chunks < 2:
        return
    for place, module in enumerate(stage.modules()):
        if isinstance(module, RowParallelLinear):
            module.forward = _row(module, reordering, place)  # type: ignore[method-assign, assignment]
        elif isinstance(module, ColumnParallelLinear):
            module.forward = _column(module, reordering, place)  # type: ignore[method-assign, assignment]
        elif isinstance(module, Head):
            module.logits = _head(module, reordering, place)  # type: ignore[method-assign, assignment]
