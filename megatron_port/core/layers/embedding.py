"""Token embedding with the vocabulary split over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron_port.core.dist.collectives import reduce_from_tp, reduce_scatter_sequence
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.positions import Positions
from megatron_port.core.dist.record import InitSpec, Shard, attach, make_record
from megatron_port.core.layers.fused import FirstOrderFunction, first_order, gradient_dtype
from megatron_port.core.layers.linear import WgradAccumulator, torch_add_rows


def padded_vocab_size(vocab_size: int, *, tp: int, multiple: int) -> int:
    """Return the rows padded to a multiple of ``multiple * tp``, as the layout needs; checkpoints hold no padding."""
    unit = multiple * tp
    return -(-vocab_size // unit) * unit


def vocab_parameter(
    name: str, vocab_size: int, hidden_size: int, *, ctx: ParallelContext, padding_multiple: int, init: InitSpec,
    dtype: torch.dtype, tied_key: str | None = None, tied_primary: bool = True,
) -> nn.Parameter:
    """A [padded_vocab/tp, hidden] parameter of logical shape [vocab, hidden], split by rows."""
    record = make_record(
        name, (vocab_size, hidden_size), ctx, init=init, decay=True, shards=(Shard(0, ("tp",)),),
        padded=padded_vocab_size(vocab_size, tp=ctx.size("tp"), multiple=padding_multiple),
        tied_key=tied_key, tied_primary=tied_primary,
    )
    return attach(nn.Parameter(torch.zeros(record.local_shape, dtype=dtype, device=ctx.device)), record)


class _Rows(FirstOrderFunction):
    """Rows of a table [vocab, hidden], whose gradient goes to its ``wgrad_accumulator`` (``layers.linear``): into the
    engine's sum at once, without a gradient of the whole table. A table without one gets that gradient, whose rows are
    rounded at most once: torch's own on a CPU rounds after each token. So does one ``by_autograd``.
    """

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weight: torch.Tensor, by_autograd: bool) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        ctx.weight, ctx.by_autograd = weight, by_autograd
        return F.embedding(tokens, weight)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor | None, None]:
        (tokens,) = ctx.saved_tensors
        weight, rows = ctx.weight, grad.flatten(0, -2)
        accumulator: WgradAccumulator | None = getattr(weight, "wgrad_accumulator", None)
        if accumulator is not None and not ctx.by_autograd:
            accumulator.add(weight, accumulator.add_rows, tokens.flatten(), rows)
            return None, None, None
        total = torch.zeros(weight.shape, dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device)
        torch_add_rows(total, tokens.flatten(), rows)
        return None, total, None


def table_rows(tokens: torch.Tensor, table: torch.Tensor, *, by_autograd: bool = False) -> torch.Tensor:
    """Return rows [..., hidden] of ``table`` [rows, hidden] for ``tokens`` int64 [...]; see :class:`_Rows`."""
    rounds = table.device.type == "cpu" and table.dtype in (torch.bfloat16, torch.float16)
    if torch.is_grad_enabled() and table.requires_grad and (rounds or hasattr(table, "wgrad_accumulator")):
        rows: torch.Tensor = _Rows.apply(tokens, table, by_autograd)
        return rows
    return F.embedding(tokens, table)


class _Positions(FirstOrderFunction):
    """Rows of a table at ``positions``, as [rows, batch, hidden] without copies; the gradient is summed over the batch
    in float32 or wider."""

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, positions: Positions, batch: int) -> torch.Tensor:
        ctx.positions, ctx.shape, ctx.dtype = positions, table.shape, gradient_dtype(table)
        return positions.take(table)[:, None, :].expand(-1, batch, -1)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        rows = grad.sum(1, dtype=ctx.dtype)
        if ctx.positions.runs != ((0, ctx.shape[0]),):
            rows = rows.new_zeros(ctx.shape).index_copy_(0, ctx.positions.index(rows.device), rows)
        return rows, None, None


def position_rows(table: torch.Tensor, positions: Positions, batch: int) -> torch.Tensor:
    """Return the rows [rows, batch, hidden] of a table of learned positions, the same for each sample."""
    rows: torch.Tensor = _Positions.apply(table, positions, batch)
    return rows


class VocabParallelEmbedding(nn.Module):
    """Rows of W for tokens [seq, batch] → [seq(/tp), batch, hidden].

    Each rank looks up the tokens in its slice of the vocabulary and
    contributes zeros for the others; the sum over ranks is the embedding.

    Where an engine has sums of gradients, that of each use of a table is added by itself: autograd would add those of
    several uses in the compute dtype, which differs with the stages that they are on. ``by_autograd``: it does.
    """

    def __init__(self, weight: nn.Parameter, *, ctx: ParallelContext, sequence_parallel: bool) -> None:
        super().__init__()
        self.weight, self.group, self.sequence_parallel = weight, ctx.over("tp"), sequence_parallel
        self.by_autograd = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        group = self.group
        if group is None:
            return table_rows(tokens, self.weight, by_autograd=self.by_autograd)
        record = self.weight.record  # type: ignore[attr-defined]
        local = tokens - record.offset[0]
        outside = (local < 0) | (local >= record.extent[0])
        y = table_rows(local.masked_fill(outside, 0), self.weight, by_autograd=self.by_autograd)
        y = y.masked_fill(outside.unsqueeze(-1), 0.0)
        return reduce_scatter_sequence(y, group) if self.sequence_parallel else reduce_from_tp(y, group)
