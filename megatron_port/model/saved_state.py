"""Records of a model's parameters and buffers, which checkpoints hold."""

from __future__ import annotations

import torch

from megatron_port.backend.providers import torch_providers
from megatron_port.config.schema import LayoutConfig, ModelConfig
from megatron_port.model.build import BuildContext
from megatron_port.model.gpt import GPTStage
from megatron_port.parallel.buffers import recorded_buffers
from megatron_port.parallel.context import ParallelContext
from megatron_port.parallel.random import DropoutStream
from megatron_port.parallel.record import ParameterRecord, record_of


def state_records(model: ModelConfig) -> dict[str, ParameterRecord]:
    """Return the records of the unsplit model by canonical name, parameters before buffers. Built on meta tensors."""
    build = BuildContext(
        model=model, layout=LayoutConfig(vocab_padding_multiple=1), ctx=ParallelContext.single("meta"),
        providers=torch_providers(), stream=DropoutStream(0, torch.device("meta")), dtype=torch.float32,
    )
    stage = GPTStage(build, start=0, stop=model.num_layers)
    records = [record_of(p) for p in stage.parameters()] + [record for record, _ in recorded_buffers(stage)]
    return {record.name: record for record in records}
