"""Records of a model's parameters and buffers, which checkpoints hold."""

from __future__ import annotations

import torch

from megatron_port.core.config.fine_tuning import NO_ADAPTERS, FineTuningConfig
from megatron_port.core.config.schema import LayoutConfig, ModelConfig
from megatron_port.core.dist.collectives import recorded_buffers
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.record import ParameterRecord, record_of
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.providers import torch_providers
from megatron_port.core.layers.step import StepSlot
from megatron_port.core.model.build import BuildContext, BuildOptions
from megatron_port.core.model.decoder import GPTStage


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
