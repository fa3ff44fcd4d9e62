"""What every module of the model is built with."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megatron_port.backend.providers import Providers
from megatron_port.config.schema import LayoutConfig, ModelConfig
from megatron_port.model.cache import CacheSlot
from megatron_port.model.rotary import RotaryTables
from megatron_port.parallel.context import ParallelContext
from megatron_port.parallel.linear_kernels import LinearKernels, make_linear_kernels
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
    """Dtype of parameters and activations."""
    rotary: RotaryTables = field(default_factory=RotaryTables)
    cache: CacheSlot = field(default_factory=CacheSlot)
    """Cache of generation; empty while training."""

    @property
    def kernels(self) -> LinearKernels:
        """Kernels of the layers' linears; embedding, head and attention stay in the compute dtype."""
        return make_linear_kernels(self.providers.fp8)

    @property
    def sequence_parallel(self) -> bool:
        """Sequence parallelism is on and has more than one rank to split over."""
        return self.layout.sequence_parallel and self.ctx.topology.tp > 1

    @property
    def init(self) -> InitSpec:
        """Initial values of weights that do not write into the residual stream."""
        return InitSpec("normal", self.model.init_std)

    @property
    def output_init(self) -> InitSpec:
        """Initial values of a layer's two projections that write into the residual stream (GPT-2's 1/sqrt(2 L))."""
        return InitSpec("normal", self.model.init_std / (2 * self.model.num_layers) ** 0.5)

    @property
    def dropout_now(self) -> float:
        """Probability of hidden dropout in the pass at hand: 0 during evaluation."""
        return self.model.hidden_dropout if self.stream.enabled else 0.0

    def _seq_offset(self, x: torch.Tensor) -> int:
        """Where a slice [seq(/tp), batch, hidden] of the residual stream starts in the global sequence."""
        return self.ctx.coords.tp * x.shape[0] if self.sequence_parallel else 0

    def residual_dropout(self, x: torch.Tensor, *, op: str) -> torch.Tensor:
        """Hidden dropout of [seq(/tp), batch, hidden] at its place in the global sequence."""
        return self.stream.dropout(
            x, self.dropout_now, op=op, seq_offset=self._seq_offset(x), width=self.model.hidden_size
        )

    def bias_dropout_add(
        self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, *, op: str
    ) -> torch.Tensor:
        """residual + dropout(x + bias), all [seq(/tp), batch, hidden]."""
        p, fused = self.dropout_now, self.providers.bias_dropout_add
        if bias is None and p == 0.0:
            return residual + x
        if fused is None:
            return residual + self.residual_dropout(x if bias is None else x + bias, op=op)
        return fused(
            x, bias, residual, self.stream.sample_keys(p), op_key=self.stream.op_key(op), p=p,
            seq_offset=self._seq_offset(x), width=self.model.hidden_size, width_offset=0,
        )
