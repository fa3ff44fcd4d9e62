"""The native engine's masters and optimizer state as pieces of logical tensors, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from megatron_port.core.dist.record import WEIGHT, ParameterRecord, StatePiece, StateReader
from megatron_port.core.engine.module import ScratchBuffer, logical_pieces, read_local, read_range
from megatron_port.core.optim.bucket_memory import StateShard
from megatron_port.core.optim.sharded import ShardedParameters


def state_pieces(sharded: ShardedParameters) -> Iterator[StatePiece]:
    """Yield the masters and the optimizer's state that this rank owns."""
    sharded.settle_state()
    for piece in sharded.pieces:
        if not piece.record.is_owned(sharded.ctx.mesh, sharded.ctx.rank, spread=sharded.spread):
            continue
        yield from logical_pieces(piece.record, WEIGHT, piece.master.detach(), piece.start)
        for kind in sharded.rule.state(piece.record):
            if kind.divided:
                flat, start = piece.state[kind.name], piece.start // kind.block
                yield from logical_pieces(kind.place(piece.record), kind.name, flat, start)
    yield from _reduced_pieces(sharded)


def _reduced_pieces(sharded: ShardedParameters) -> Iterator[StatePiece]:
    """Yield the state of rows and columns that this rank owns; columns once, where it has two slices of a name."""
    seen: set[tuple[str, str, tuple[int, ...]]] = set()
    for one in sharded.reduced:
        record, name = one.kind.place(one.record), one.kind.name
        if record.is_owned(sharded.ctx.mesh, sharded.ctx.rank) and (record.name, name, record.offset) not in seen:
            seen.add((record.name, name, record.offset))
            yield from logical_pieces(record, name, one.tensor.reshape(-1), 0)


@torch.no_grad()
def load_state(
    sharded: ShardedParameters, parameters: Sequence[tuple[ParameterRecord, nn.Parameter]], read: StateReader
) -> None:
    """Set masters, weights and optimizer state. Each rank reads its own slices, without communication."""
    sharded.wait()
    sharded.settle_state()
    pieces: dict[tuple[str, tuple[int, ...]], list[StateShard]] = {}
    for piece in (*sharded.pieces, *sharded.frozen_pieces):
        pieces.setdefault(piece.record.place, []).append(piece)
    scratch = ScratchBuffer(sharded.wide)
    for record, p in parameters:
        mine = pieces.get(record.place, [])
        whole = _place(sharded, p, mine, scratch)
        read_local(read, record, WEIGHT, whole)
        sharded.set_weight(p, whole, mine)
        for piece in mine:
            part = whole.view(-1)[piece.start : piece.start + piece.master.numel()]
            if part.data_ptr() != piece.master.data_ptr():
                piece.master.copy_(part)
        for piece in mine:
            _load_rule_state(sharded, piece, read, scratch)
    for one in sharded.reduced:
        read_local(read, one.kind.place(one.record), one.kind.name, one.tensor)


def _load_rule_state(sharded: ShardedParameters, piece: StateShard, read: StateReader, scratch: ScratchBuffer) -> None:
    for kind in sharded.rule.state(piece.record):
        if kind.name in piece.state:  # of frozen weights there is none
            flat, start = piece.state[kind.name], piece.start // kind.block
            read_range(read, kind.place(piece.record), kind.name, flat, start, scratch)


def _place(
    sharded: ShardedParameters, p: torch.Tensor, mine: Sequence[StateShard], scratch: ScratchBuffer
) -> torch.Tensor:
    """Return a tensor in the masters' dtype to read a parameter into: its permanent one where there is one."""
    permanent = sharded.permanent(p)
    if permanent is not None:
        return permanent
    if mine and mine[0].master.numel() == p.numel():
        return mine[0].master.view(p.shape)
    return scratch.get(p.shape, p.device)
