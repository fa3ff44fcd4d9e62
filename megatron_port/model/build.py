"""What every module of the model is built with."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from megatron_port.backend.providers import Providers
from megatron_port.config.schema import LayoutConfig, ModelConfig
from megatron_port.model.cache import CacheSlot
from megatron_port.model.rotary import RotaryTables
from megatron_port.parallel.context import ParallelContext
from megatron_port.parallel.cross_entropy import TokenLoss, vocab_parallel_cross_entropy
from megatron_port.parallel.linear_kernels import LinearKernels, make_linear_kernels
from megatron_port.parallel.positions import Positions, SequencePartition, sequence_partition
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
    loss: TokenLoss = vocab_parallel_cross_entropy
    """Of the head while training; evaluations take the cross-entropy."""
    rotary: RotaryTables = field(default_factory=RotaryTables)
    cache: CacheSlot = field(default_factory=CacheSlot)
    """Of generation; empty while training."""

    @property
    def products(self) -> LinearKernels:
        """Of the layers' linears; embedding, head and attention stay in the dtype."""
        return make_linear_kernels(self.providers.fp8)

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

    @property
    def dropout_now(self) -> float:
        """Probability of hidden dropout in the pass at hand: 0 during evaluation."""
        return self.model.hidden_dropout if self.stream.enabled else 0.0

    @cached_property
    def partition(self) -> SequencePartition:
        """Which positions of a sequence this rank holds."""
        return sequence_partition(self.ctx.mesh, self.ctx.rank, sequence_parallel=self.sequence_parallel)

    def held_positions(self, rows: int) -> Positions:
        """Positions of the ``rows`` rows of this rank's queries, keys and values."""
        return self.partition.held(self.partition.seq_length(rows))

    def residual_positions(self, rows: int) -> Positions:
        """Positions of the ``rows`` rows of this rank's residual stream."""
        return self.partition.residual(self.partition.seq_length(rows * self.partition.pieces))

    def residual_dropout(self, x: torch.Tensor, *, op: str) -> torch.Tensor:
        """Hidden dropout of rows [seq(/tp), batch, hidden] of the residual stream."""
        return self.stream.dropout(
            x, self.dropout_now, op=op, positions=self.residual_positions(x.shape[0]), width=self.model.hidden_size
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
        positions, keys, width = self.residual_positions(x.shape[0]), self.stream.sample_keys(p), self.model.hidden_size
        parts = [  # a call for each run: the kernel knows one start
            fused(part, bias, rest, keys, op_key=self.stream.op_key(op), p=p, seq_offset=run.start, width=width,
                  width_offset=0)
            for (run, part), (_, rest) in zip(positions.split(x), positions.split(residual))
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
