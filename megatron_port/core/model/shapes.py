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


LAST_STEP = ".mlp.router.load"
"""End of the names of buffers that hold what the step before counted: a model's weights have none."""


def buffer_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the buffers of a model's routers by canonical name."""
    moe = model.moe
    there = {".mlp.router.balance_bias": moe.balance_bias, LAST_STEP: moe.balance_loss == "previous_step"}
    layers = [f"layers.{i}" for i in range(model.num_layers)] + [f"mtp.{i}.layer" for i in range(model.mtp_layers)]
    return {
        f"{layer}{name}": (moe.num_experts,)
        for i, layer in enumerate(layers) if moe.has_experts(i) for name, is_there in there.items() if is_there
    }
