"""Names, shapes and records of all parameters of the unsplit model, from its spec."""

from __future__ import annotations

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import REPLICAS
from megatron_port.core.dist.record import SEQUENCE, InitSpec, ParameterRecord, Shard, make_record
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.model.spec import ParameterSpec


def model_records(model: ModelConfig) -> dict[str, ParameterRecord]:
    """Return the records of the unsplit model's parameters by canonical name, in model order."""
    return {spec.name: _record(spec) for spec in model_spec(model).parameters()}


def _record(spec: ParameterSpec) -> ParameterRecord:
    experts = spec.split is not None and spec.split.experts
    groups = spec.split.groups if spec.split is not None and len(spec.shape) > 1 else None
    shards = () if spec.split is None else (Shard(spec.split.dim, ("ep" if experts else "tp",)),)
    return make_record(
        spec.name, spec.shape, ParallelContext.single(), init=InitSpec(spec.init, spec.std), decay=spec.decay,
        shards=shards, partial_over=SEQUENCE if experts else REPLICAS,
        row_runs=() if groups is None else groups.row_runs,
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
