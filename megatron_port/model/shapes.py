"""Names, shapes and records of all parameters of the unsplit model, from its spec."""

from __future__ import annotations

from megatron_port.config.schema import ModelConfig
from megatron_port.model.decoder_spec import model_spec
from megatron_port.model.spec import ParameterSpec
from megatron_port.parallel.context import ParallelContext
from megatron_port.parallel.record import InitSpec, ParameterRecord, Shard, make_record


def model_records(model: ModelConfig) -> dict[str, ParameterRecord]:
    """Return the records of the unsplit model's parameters by canonical name, in model order."""
    return {spec.name: _record(spec) for spec in model_spec(model).parameters()}


def _record(spec: ParameterSpec) -> ParameterRecord:
    axis = "ep" if spec.split is not None and spec.split.experts else "tp"
    shards = () if spec.split is None else (Shard(spec.split.dim, (axis,)),)
    return make_record(
        spec.name, spec.shape, ParallelContext.single(), init=InitSpec(spec.init, spec.std), decay=spec.decay,
        shards=shards,
    )


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the logical global shapes of all parameters by canonical name."""
    return {spec.name: spec.shape for spec in model_spec(model).parameters()}


def buffer_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what a model has beside its parameters: biases that only choose experts."""
    layers = ((i, layer.moe) for i, layer in enumerate(model_spec(model).layers))
    biases = ((i, moe.balance) for i, moe in layers if moe is not None and moe.balance is not None)
    return {f"layers.{i}.{bias.name}": bias.shape for i, bias in biases}
