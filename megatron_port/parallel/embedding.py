"""Token embedding with the vocabulary split over tensor-parallel ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

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


class VocabParallelEmbedding(nn.Module):
    """Rows of W for tokens [seq, batch] → [seq(/tp), batch, hidden].

    Each rank looks up the tokens in its slice of the vocabulary and
    contributes zeros for the others; the sum over ranks is the embedding.
    """

    def __init__(self, weight: nn.Parameter, *, ctx: ParallelContext, sequence_parallel: bool) -> None:
        super().__init__()
        self.weight, self.group, self.sequence_parallel = weight, ctx.over("tp"), sequence_parallel

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        group = self.group
        if group is None:
            return F.embedding(tokens, self.weight)
        record = self.weight.record  # type: ignore[attr-defined]
        local = tokens - record.offset[0]
        outside = (local < 0) | (local >= record.extent[0])
        y = F.embedding(local.masked_fill(outside, 0), self.weight).masked_fill(outside.unsqueeze(-1), 0.0)
        return reduce_scatter_sequence(y, group) if self.sequence_parallel else reduce_from_tp(y, group)
