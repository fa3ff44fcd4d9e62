"""Names, shapes and records of all parameters of the unsplit model, from its spec."""

from __future__ import annotations

import torch
import xxhash

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import REPLICAS
from megatron_port.core.dist.record import SEQUENCE, WEIGHT, InitSpec, ParameterRecord, Shard, StateReader, make_record
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.model.spec import ParameterSpec


def model_records(model: ModelConfig) -> dict[str, ParameterRecord]:
    """Return the records of the unsplit model's parameters by canonical name, in model order."""
    return {spec.name: _record(spec) for spec in model_spec(model).parameters()}


def _record(spec: ParameterSpec) -> ParameterRecord:
    experts = spec.split is not None and spec.split.experts
    shards = () if spec.split is None else (Shard(spec.split.dim, ("ep" if experts else "tp",)),)
    return make_record(
        spec.name, spec.shape, ParallelContext.single(), init=InitSpec(spec.init, spec.std), decay=spec.decay,
        shards=shards, partial_over=SEQUENCE if experts else REPLICAS,
        row_runs=spec.row_runs,
    )


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the logical global shapes of all parameters by canonical name."""
    return {spec.name: spec.shape for spec in model_spec(model).parameters()}


def buffer_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's buffers by canonical name."""
    spec = model_spec(model)
    layers = [(f"layers.{i}", layer) for i, layer in enumerate(spec.layers)]
    layers += [(f"mtp.{i}.layer", part.layer) for i, part in enumerate(spec.head.predictions)]
    return {f"{name}.{one.name}": one.shape for name, layer in layers for one in layer.mlp.buffers}


# Which weights a model has, by their values.

ROWS, COLUMNS = 3, 256
"""Looked at in each matrix, the rows spread evenly from first to last."""


def fingerprint(model: ModelConfig, read: StateReader) -> str:
    """Return 32 hex digits of a part of every parameter's values: at most ``ROWS`` x ``COLUMNS`` of each.

    The values are rounded to float32, and neither the layout nor the format counts: a folder and its import have the
    same. Training changes nearly every value, so other weights have another; a single flipped bit may not.
    """
    digest = xxhash.xxh3_128()
    for name, shape in parameter_shapes(model).items():
        digest.update(f"{name} {shape}".encode())
        for offset, size in _looked_at(shape):
            digest.update(read(name, WEIGHT, offset, size).to(torch.float32).contiguous().numpy().data)
    return digest.hexdigest()


def _looked_at(shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return (offset, shape) of the slices of a parameter that are looked at."""
    width = min(shape[-1], COLUMNS)
    if len(shape) == 1:
        return [((0,), (width,))]
    last = [n - 1 for n in shape[:-1]]
    starts = sorted({tuple(n * i // (ROWS - 1) for n in last) for i in range(ROWS)})
    return [((*start, 0), (*(1 for _ in start), width)) for start in starts]
