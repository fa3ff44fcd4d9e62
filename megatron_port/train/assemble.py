"""Put a run together: the one place that knows the model and the engines both."""

from __future__ import annotations

import torch

from megatron_port.backend.providers import Providers
from megatron_port.config.schema import RunConfig
from megatron_port.engine.api import Engine
from megatron_port.engine.native import NativeEngine
from megatron_port.model.build import BuildContext
from megatron_port.model.gpt import GPTStage, build_stage, unit_costs
from megatron_port.parallel.context import ParallelContext
from megatron_port.parallel.init import initial_reader
from megatron_port.parallel.random import DropoutStream
from megatron_port.parallel.record import record_of
from megatron_port.pipeline.partition import balanced_layers
from megatron_port.runtime.pulse import Pulse

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def layers_by_stage(config: RunConfig, pp: int) -> tuple[int, ...]:
    """Transformer layers of each stage: the configured split, or the balanced one."""
    return config.layout.pipeline_split or balanced_layers(unit_costs(config.model), pp)


def build_model(config: RunConfig, ctx: ParallelContext, providers: Providers, stream: DropoutStream) -> GPTStage:
    """This rank's stage; its parameters are allocated, not yet initialised."""
    build = BuildContext(
        model=config.model, layout=config.layout, ctx=ctx, providers=providers, stream=stream,
        dtype=DTYPES[config.precision.dtype],
    )
    return build_stage(build, layers_by_stage(config, ctx.topology.pp))


def build_engine(
    config: RunConfig, ctx: ParallelContext, providers: Providers, *, initialise: bool = True,
    pulse: Pulse | None = None,
) -> Engine:
    """Model and engine of a run, with initial weights unless a checkpoint will be loaded over them.

    The two engines agree on the start as well: masters are the float32 initial
    values, the weights their rounding.
    """
    stream = DropoutStream(config.seed, ctx.device)
    stage = build_model(config, ctx, providers, stream)
    dtype = DTYPES[config.precision.dtype]
    engine: Engine
    if config.engine == "native":
        engine = NativeEngine(
            stage, config, ctx, stream, dtype=dtype, optimizer_provider=providers.optimizer, pulse=pulse
        )
    else:
        from megatron_port.engine.deepspeed_engine import DeepSpeedEngine

        engine = DeepSpeedEngine(
            stage, config, ctx, stream, dtype=dtype, optimizer_provider=providers.optimizer, pulse=pulse
        )
    if initialise:
        records = {record_of(p).name: record_of(p) for p in stage.parameters()}
        engine.load_weights(initial_reader(records, config.seed, ctx.device))
    return engine
