"""Names and shapes of all parameters of a model, without allocating any."""

from __future__ import annotations

import torch

from megatron_port.backend.providers import torch_providers
from megatron_port.config.schema import LayoutConfig, ModelConfig
from megatron_port.model.build import BuildContext
from megatron_port.model.gpt import GPTStage
from megatron_port.parallel.context import ParallelContext
from megatron_port.parallel.random import DropoutStream
from megatron_port.parallel.record import ParameterRecord, record_of


def model_records(model: ModelConfig) -> dict[str, ParameterRecord]:
    """Canonical name → record of the unsplit model, in order. Built on the meta device."""
    ctx = ParallelContext.single("meta")
    build = BuildContext(
        model=model, layout=LayoutConfig(vocab_padding_multiple=1), ctx=ctx, providers=torch_providers(),
        stream=DropoutStream(0, torch.device("meta")), dtype=torch.float32,
    )
    stage = GPTStage(build, start=0, stop=model.num_layers)
    return {record_of(p).name: record_of(p) for p in stage.parameters()}


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name → logical global shape."""
    return {name: record.shape for name, record in model_records(model).items()}
