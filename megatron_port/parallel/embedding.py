"""Token embedding with the vocabulary split over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron_port.backend.direct import FirstOrderFunction, first_order
from megatron_port.parallel.collectives import reduce_from_tp, reduce_scatter_sequence
from megatron_port.parallel.context import ParallelContext
from megatron_port.parallel.record import InitSpec, Shard, attach, make_record


def padded_vocab_size(vocab_size: int, *, tp: int, multiple: int) -> int:
    """Return the rows padded to a multiple of ``multiple * tp``, as the layout needs; checkpoints hold no padding."""
    unit = multiple * tp
    return -(-vocab_size // unit) * unit


def vocab_parameter(
    name: str,
    vocab_size: int,
    hidden_size: int,
    *,
    ctx: ParallelContext,
    padding_multiple: int,
    init: InitSpec,
    dtype: torch.dtype,
    tied_key: str | None = None,
    tied_primary: bool = True,
) -> nn.Parameter:
    """A [padded_vocab/tp, hidden] parameter of logical shape [vocab, hidden], split by rows."""
    record = make_record(
        name, (vocab_size, hidden_size), ctx, init=init, decay=True, shards=(Shard(0, ("tp",)),),
        padded=padded_vocab_size(vocab_size, tp=ctx.size("tp"), multiple=padding_multiple),
        tied_key=tied_key, tied_primary=tied_primary,
    )
    return attach(nn.Parameter(torch.zeros(record.local_shape, dtype=dtype, device=ctx.device)), record)


class _Rows(FirstOrderFunction):
    """Rows of a table [vocab, hidden], whose gradient goes to its ``wgrad_accumulator`` (``parallel.linear``)."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        ctx.weight = weight
        return F.embedding(tokens, weight)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        (tokens,) = ctx.saved_tensors
        ctx.weight.wgrad_accumulator.add(ctx.weight, _add_rows, tokens.flatten(), grad.flatten(0, -2))
        return None, None


def _add_rows(total: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor) -> None:
    total.index_add_(0, tokens, rows.to(total.dtype))


class VocabParallelEmbedding(nn.Module):
    """Rows of W for tokens [seq, batch] → [seq(/tp), batch, hidden].

    Each rank looks up the tokens in its slice of the vocabulary and
    contributes zeros for the others; the sum over ranks is the embedding.

    ``apart``: a further use of a table. Its gradient is added to the engine's sum by itself: autograd would add those
    of several uses in the compute dtype, which differs with the stages that they are on.
    """

    def __init__(
        self, weight: nn.Parameter, *, ctx: ParallelContext, sequence_parallel: bool, apart: bool = False
    ) -> None:
        super().__init__()
        self.weight, self.group, self.sequence_parallel = weight, ctx.over("tp"), sequence_parallel
        self.apart = apart

    def _rows(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.apart and self.weight.requires_grad and hasattr(self.weight, "wgrad_accumulator"):
            rows: torch.Tensor = _Rows.apply(tokens, self.weight)
            return rows
        return F.embedding(tokens, self.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        group = self.group
        if group is None:
            return self._rows(tokens)
        record = self.weight.record  # type: ignore[attr-defined]
        local = tokens - record.offset[0]
        outside = (local < 0) | (local >= record.extent[0])
        y = self._rows(local.masked_fill(outside, 0)).masked_fill(outside.unsqueeze(-1), 0.0)
        return reduce_scatter_sequence(y, group) if self.sequence_parallel else reduce_from_tp(y, group)
