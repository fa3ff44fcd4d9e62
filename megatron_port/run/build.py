"""Put a run together: the one place that knows the model and the engines both."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from megatron_port.core.config.features import NO_ADAPTERS, FineTuningConfig
from megatron_port.core.config.schema import LayoutConfig, ModelConfig, RunConfig
from megatron_port.core.data.objective import objective_of
from megatron_port.core.dist.collectives import recorded_buffers
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.dist.process import ProgressTracker
from megatron_port.core.dist.record import ParameterRecord, StateReader, initial_reader, record_of
from megatron_port.core.engine.api import Engine
from megatron_port.core.engine.native import NativeEngine
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.providers import Providers, torch_providers
from megatron_port.core.layers.step import StepSlot
from megatron_port.core.model.build import BuildContext, BuildOptions
from megatron_port.core.model.decoder import GPTStage, shared_layers
from megatron_port.core.model.shapes import parameter_shapes
from megatron_port.core.pipeline.partition import balanced_layers
from megatron_port.core.registry import LOSSES
from megatron_port.ext.memory.sites import decided, layer_choices
from megatron_port.ext.telemetry.flops import unit_costs

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def kv_copies(config: RunConfig) -> int:
    """Return how many tensor-parallel ranks hold the same key/value heads."""
    return config.model.kv_heads_held(config.layout.tensor_parallel_size) // config.model.kv_heads


def topology_of(config: RunConfig) -> Topology:
    """Return the rank grid of a resolved run."""
    layout = config.layout
    return with_shared_layers(config, Topology(
        tp=layout.tensor_parallel_size, pp=layout.pipeline_parallel_size, dp=layout.data_parallel_size,
        vp=layout.virtual_pipeline_size, folded=layout.pipeline_schedule == "zb-v", kv_copies=kv_copies(config),
        cp=layout.context_parallel_size, ep=layout.expert_parallel_size, shard=layout.shard_size,
    ))


def with_shared_layers(config: RunConfig, topology: Topology) -> Topology:
    """Return the grid with the sets of stages that hold copies of the same layers."""
    if config.model.shared_layers == 1 or topology.pp == 1:  # before anything is split
        return topology
    shared = shared_layers(config.model, topology, layers_by_chunk(config, topology))
    return topology if shared is None else replace(topology, shared=shared.spanning)


def layers_by_chunk(config: RunConfig, topology: Topology) -> tuple[int, ...]:
    """Return the transformer layers of each virtual stage: the configured split, or the balanced one."""
    return config.layout.pipeline_split or balanced_layers(unit_costs(config.model), topology.virtual_stages)


def build_model(
    config: RunConfig, ctx: ParallelContext, providers: Providers, step: StepSlot
) -> list[GPTStage]:
    """Return this rank's chunks of the model; their parameters are allocated, not yet initialised.

    Raises:
        CheckpointError, ConfigError: what the objective reads is not there, or does not fit the run.
    """
    objective = objective_of(config)
    options = BuildOptions(
        loss=LOSSES.function(objective.token_loss), objective=objective, z_loss=config.training.z_loss,
        recompute=config.activations.recompute,
        layer_activations=dict(enumerate(map(decided, layer_choices(config.activations, config.model.num_layers)))),
        head_chunk=max(config.activations.head_chunk, 0), position_reset=config.data.position_reset,
        fine_tuning=config.fine_tuning, quantisation=config.quantisation,
    )
    build = BuildContext(
        model=config.model, layout=config.layout, ctx=ctx, providers=providers, step=step,
        dtype=DTYPES[config.precision.dtype], options=options,
    )
    chunks = objective.build(build, layers_by_chunk(config, ctx.topology))
    if config.optimizer.groups or config.model.width_factor != 1.0:
        from megatron_port.ext.rules.groups import set_parameter_groups  # few runs have any

        set_parameter_groups((p for chunk in chunks for p in chunk.parameters()), config)
    if config.fine_tuning.enabled:
        from megatron_port.ext.weights.adapters import freeze_all_but_adapters

        freeze_all_but_adapters(chunks)
    return chunks


def check_parameter_groups(config: RunConfig) -> None:
    """Raise ConfigError if a group of ``optimizer.groups`` has no parameter."""
    if not config.optimizer.groups:
        return
    from megatron_port.ext.rules.groups import check_groups

    names = list(parameter_shapes(config.model))
    if config.fine_tuning.enabled:
        from megatron_port.ext.weights.adapter_spec import adapter_parameters

        names += adapter_parameters(config.model, config.fine_tuning)
    check_groups(config.optimizer.groups, names)


def _building(config: RunConfig) -> AbstractContextManager[None]:
    """Return the context in which a model is built: under ZeRO stage 3 without memory for its weights."""
    if config.engine != "native" or config.layout.zero_stage < 3:
        return nullcontext()
    from megatron_port.ext.memory.zero3 import without_memory  # a run whose weights are whole does without it

    return without_memory()


def why_not_captured(config: RunConfig, device: torch.device, optimizer: str) -> str:
    """Return why the steps of a run are not captured and replayed; empty: they are. ``optimizer``: its provider."""
    if config.engine != "native" or device.type != "cuda":
        return "nothing is launched on a CPU" if device.type == "cpu" else f"{config.engine} drives its steps itself"
    from megatron_port.ext.kernels.settings import why_not_captured as refusal  # for runs on a GPU

    return refusal(config, amd=torch.version.hip is not None, optimizer=optimizer)


def build_engine(
    config: RunConfig, ctx: ParallelContext, providers: Providers, *, initialise: bool = True,
    progress: ProgressTracker | None = None,
) -> Engine:
    """Build the model and engine of a run, with initial weights unless a checkpoint will be loaded over them.

    The two engines agree on the start as well: masters are the float32 initial
    values, the weights their rounding.
    """
    if (config.precision.fp8 != "none") != (providers.fp8 is not None):
        raise ValueError(f"precision.fp8 is {config.precision.fp8!r}, and the providers were chosen for another")
    check_parameter_groups(config)
    if config.backend.graphs == "auto" and not why_not_captured(config, ctx.device, providers.optimizer):
        config = replace(config, backend=replace(config.backend, graphs="step"))
    step = StepSlot(DropoutStream(config.seed, ctx.device))
    with _building(config):
        chunks = build_model(config, ctx, providers, step)
    dtype, objective = DTYPES[config.precision.dtype], objective_of(config)
    engine: Engine
    if config.engine == "native":
        engine = NativeEngine(
            chunks, config, ctx, step, dtype=dtype, optimizer_provider=providers.optimizer, progress=progress,
            objective=objective,
        )
    else:
        from megatron_port.ext.deepspeed.deepspeed_engine import DeepSpeedEngine

        (stage,) = chunks  # config.checks allows it no more
        engine = DeepSpeedEngine(
            stage, config, ctx, step, dtype=dtype, objective=objective, optimizer_provider=providers.optimizer,
            progress=progress,
        )
    if initialise:
        of_parameters = [record_of(p) for chunk in chunks for p in chunk.parameters()]
        of_buffers = [record for chunk in chunks for record, _ in recorded_buffers(chunk)]
        records = {record.name: record for record in of_parameters + of_buffers}
        records = {name: record for name, record in records.items() if not objective.is_frozen(name)}
        read: StateReader = initial_reader(records, config.seed, ctx.device)
        if config.fine_tuning.enabled:
            from megatron_port.ext.weights.adapters import InitialAdapters

            read = InitialAdapters(config.model, config.fine_tuning, config.seed, read)
        if config.sparsity.enabled:
            from megatron_port.ext.weights.readers import SparseWeights

            read = SparseWeights(config.sparsity, parameter_shapes(config.model), read)
        engine.load_weights(read)
    return engine


# Records of a model's parameters and buffers, which checkpoints hold.

def state_records(model: ModelConfig, tuning: FineTuningConfig = NO_ADAPTERS) -> dict[str, ParameterRecord]:
    """Return the records of what a checkpoint of the unsplit model holds, by canonical name, parameters before buffers:
    all of it, or the adapters of ``tuning``. Built on meta tensors."""
    build = BuildContext(
        model=model, layout=LayoutConfig(vocab_padding_multiple=1), ctx=ParallelContext.single("meta"),
        providers=torch_providers(), step=StepSlot(DropoutStream(0, torch.device("meta"))), dtype=torch.float32,
        options=BuildOptions(fine_tuning=tuning),
    )
    stage = GPTStage(build, start=0, stop=model.num_layers)
    if tuning.enabled:
        from megatron_port.ext.weights.adapters import freeze_all_but_adapters

        freeze_all_but_adapters([stage])
    records = [record_of(p) for p in stage.parameters() if p.requires_grad]
    records += [record for record, _ in recorded_buffers(stage) if record.trainable]
    return {record.name: record for record in records}
