"""The native engine's state: sharding of a rank's parameters into buckets, and masters and moments to and from the
pieces of logical tensors that checkpoints hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import SHARDED
from megatron_port.core.dist.record import WEIGHT, ParameterRecord, StatePiece, StateReader
from megatron_port.core.engine.module import ScratchBuffer, logical_pieces, read_local, read_range, recorded_parameters
from megatron_port.core.errors import ConfigError
from megatron_port.core.optim.buckets import StateShard
from megatron_port.core.optim.rules import rule_of
from megatron_port.core.optim.sharded import ShardedParameters, ShardSettings
from megatron_port.core.pipeline.schedules import make_schedule
from megatron_port.core.registry import STEP_PARTS

REDUCE_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes of gradients between replicas; None: that of their sums (fp32; fp64 in fp64 runs)."""
Units = list[list[tuple[ParameterRecord, nn.Parameter]]]


def shard_parameters(
    chunks: Sequence[Any], config: RunConfig, ctx: ParallelContext, dtype: torch.dtype
) -> ShardedParameters:
    """Return a rank's parameters in buckets, sharded as ``layout.zero_stage`` and ``offload`` say.

    Raises:
        ConfigError: the schedule does not go with the stage, or parameters are in no unit of a chunk.
    """
    by_unit = parameters_by_unit(chunks)
    settings = ShardSettings(
        master_dtype=torch.float64 if dtype == torch.float64 else torch.float32,
        split_state=config.layout.zero_stage > 0, capacity=config.layout.reduce_bucket_size,
        reduce_dtype=REDUCE_DTYPES[config.precision.grad_reduce_dtype],
        shard_gradients=_shards_gradients(config, ctx),
    )
    shared = _shared(chunks)
    if config.layout.zero_stage < 3 and config.offload.optimizer == "none":
        return ShardedParameters(by_unit, ctx, settings, rule=rule_of(config.optimizer), shared=shared)
    make = STEP_PARTS.function("stage 3 or offloaded parameters")
    made: ShardedParameters = make(chunks, by_unit, config, ctx, settings, shared)
    return made


def _shards_gradients(config: RunConfig, ctx: ParallelContext) -> bool:
    """Return whether gradient sums are sharded: from ZeRO stage 2 on. Where the schedule splits backward passes, stage
    3 keeps unsharded sums, as stage 1 does.

    Raises ConfigError for stage 2 with such a schedule: each half of a backward pass would be reduced by itself.
    ``config.checks`` knows the package's own schedules, not a plugin's.
    """
    layout, batch, topology = config.layout, config.batch, ctx.topology
    if layout.zero_stage < 2:
        return False
    count = max(batch.global_batch_size // (batch.micro_batch_size * ctx.size("dp")), 1)
    schedule = make_schedule(layout.pipeline_schedule, topology.pp, count, layout.virtual_pipeline_size)
    sharded = ctx.size(*SHARDED) > 1
    if schedule.splits_backward and layout.zero_stage == 2 and sharded:
        raise ConfigError(
            f'layout.zero_stage 2 with pipeline_schedule "{schedule.name}": its backward passes are split in two; '
            "use zero_stage 1"
        )
    return not schedule.splits_backward


def parameters_by_unit(chunks: Sequence[Any]) -> list[Units]:
    """Return the parameters of each unit of each chunk. One that several units use, as a tied table, is with the first
    of them; those in no unit come before the chunk's units."""
    seen: set[int] = set()
    out = []
    for chunk in chunks:
        inside = {id(p) for unit in chunk.units for p in unit.parameters()}
        groups = [[(r, p) for r, p in recorded_parameters(chunk) if id(p) not in inside]]
        groups += [recorded_parameters(unit) for unit in chunk.units]
        units = []
        for pairs in groups:
            units.append([(record, p) for record, p in pairs if id(p) not in seen])
            seen.update(id(p) for _, p in pairs)
        out.append(units)
    return out


def _shared(chunks: Sequence[Any]) -> list[nn.Parameter]:
    """Return the parameters that several units of this rank use."""
    units = [{id(p) for p in unit.parameters()} for chunk in chunks for unit in chunk.units]
    stage = nn.ModuleList(chunks)
    return [p for _, p in recorded_parameters(stage) if sum(id(p) in unit for unit in units) > 1]


# The native engine's masters and optimizer state as pieces of logical tensors, and back.

def state_pieces(sharded: ShardedParameters) -> Iterator[StatePiece]:
    """Yield the masters and the optimizer's state that this rank owns."""
    sharded.wait_for_state()
    for piece in sharded.pieces:
        if not piece.record.is_owned(sharded.ctx.mesh, sharded.ctx.rank, zero_dims=sharded.zero_dims):
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
    sharded.wait_for_state()
    pieces: dict[tuple[str, tuple[int, ...]], list[StateShard]] = {}
    for piece in (*sharded.pieces, *sharded.frozen_shards):
        pieces.setdefault(piece.record.place, []).append(piece)
    scratch = ScratchBuffer(sharded.master_dtype)
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
    """Return a tensor in the masters' dtype to read a parameter into: its own memory, its master, or scratch."""
    permanent = sharded.permanent(p)
    if permanent is not None:
        return permanent
    if mine and mine[0].master.numel() == p.numel():
        return mine[0].master.view(p.shape)
    return scratch.get(p.shape, p.device)
