"""What every module of the model is built with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_port.backend.providers import Providers
from megatron_port.config.schema import LayoutConfig, ModelConfig
from megatron_port.parallel.context import ParallelContext
from megatron_port.parallel.random import DropoutStream
from megatron_port.parallel.record import InitSpec


@dataclass(frozen=True)
class BuildContext:
    """Handed down while a stage is built; modules keep what they need of it."""

    model: ModelConfig
    layout: LayoutConfig
    ctx: ParallelContext
    providers: Providers
    stream: DropoutStream
    dtype: torch.dtype
    """Of parameters and activations."""

    @property
    def sequence_parallel(self) -> bool:
        """Sequence parallelism is on and has more than one rank to split over."""
        return self.layout.sequence_parallel and self.ctx.topology.tp > 1

    @property
    def init(self) -> InitSpec:
        """Of weights that do not write into the residual stream."""
        return InitSpec("normal", self.model.init_std)

    @property
    def output_init(self) -> InitSpec:
        """Of the two projections of each layer that write into the residual stream (GPT-2's 1/sqrt(2 L))."""
        return InitSpec("normal", self.model.init_std / (2 * self.model.num_layers) ** 0.5)

    def residual_dropout(self, x: torch.Tensor, *, op: str) -> torch.Tensor:
        """Hidden dropout of [seq(/tp), batch, hidden] at its place in the global sequence."""
        p = self.model.hidden_dropout
        if p == 0.0:
            return x
        offset = self.ctx.coords.tp * x.shape[0] if self.sequence_parallel else 0
        return self.stream.dropout(x, p, op=op, seq_offset=offset, width=self.model.hidden_size)
