"""Context that every module of the model is built with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from megatron_port.backend.providers import Providers
from megatron_port.config.schema import LayoutConfig, ModelConfig
from megatron_port.model.rotary import RotaryTables
from megatron_port.model.spec import LinearSpec, ParameterSpec
from megatron_port.parallel.context import ParallelContext
from megatron_port.parallel.cross_entropy import TokenLoss, vocab_parallel_cross_entropy
from megatron_port.parallel.embedding import vocab_parameter
from megatron_port.parallel.linear import ColumnParallelLinear, RowParallelLinear, Rows
from megatron_port.parallel.linear_kernels import LinearKernels, make_linear_kernels
from megatron_port.parallel.mesh import REPLICAS
from megatron_port.parallel.positions import Positions, SequencePartition, sequence_partition
from megatron_port.parallel.random import DropoutStream
from megatron_port.parallel.record import SEQUENCE, InitSpec, attach, make_record


@dataclass(frozen=True)
class BuildContext:
    """Configuration, parallel context and providers of a stage. Modules keep the parts that they need."""

    model: ModelConfig
    layout: LayoutConfig
    ctx: ParallelContext
    providers: Providers
    stream: DropoutStream
    dtype: torch.dtype
    """Of parameters and activations."""
    loss: TokenLoss = vocab_parallel_cross_entropy
    """Of the head while training; evaluations take the cross-entropy."""

    @property
    def kernels(self) -> LinearKernels:
        """Kernels of the layers' linears; embedding, head and attention stay in the compute dtype."""
        return make_linear_kernels(self.providers.fp8)

    @property
    def sequence_parallel(self) -> bool:
        """Whether sequence parallelism is on and there is more than one tensor-parallel rank."""
        return self.layout.sequence_parallel and self.ctx.topology.tp > 1

    def column(
        self, layer: str, spec: LinearSpec, *, rows: tuple[Rows, Rows] | None = None, skip_bias: bool = False
    ) -> ColumnParallelLinear:
        """Build the linear layer of a spec with its outputs split over the tensor-parallel ranks."""
        return ColumnParallelLinear(
            f"{layer}.{spec.name}", spec.inputs, spec.outputs, ctx=self.ctx, bias=spec.bias,
            sequence_parallel=self.sequence_parallel, init=InitSpec("normal", spec.std), packed=spec.packed, rows=rows,
            skip_bias=skip_bias, dtype=self.dtype, kernels=self.kernels,
        )

    def row(self, layer: str, spec: LinearSpec) -> RowParallelLinear:
        """Build the linear layer of a spec with inputs split over tensor-parallel ranks; the caller adds its bias."""
        return RowParallelLinear(
            f"{layer}.{spec.name}", spec.inputs, spec.outputs, ctx=self.ctx, bias=spec.bias,
            sequence_parallel=self.sequence_parallel, init=InitSpec("normal", spec.std), skip_bias=True,
            dtype=self.dtype, kernels=self.kernels,
        )

    def unsplit(self, spec: ParameterSpec, layer: str = "") -> nn.Parameter:
        """Build a parameter that every tensor-parallel rank holds in full; ``layer`` is the prefix of its name."""
        partial = spec.is_partial(self.ctx.size("tp"), self.sequence_parallel)
        record = make_record(
            f"{layer}.{spec.name}" if layer else spec.name, spec.shape, self.ctx, init=InitSpec(spec.init, spec.std),
            decay=spec.decay, partial_over=SEQUENCE if partial else REPLICAS,
        )
        return attach(nn.Parameter(torch.empty(spec.shape, dtype=self.dtype, device=self.ctx.device)), record)

    def table(self, spec: ParameterSpec, *, tied_apart: bool, primary: bool = True) -> nn.Parameter:
        """The token table or the head's matrix. ``tied_apart``: another stage has a copy; ``primary``: this is the one
        that is counted and saved."""
        return vocab_parameter(
            spec.name, *spec.shape, ctx=self.ctx, padding_multiple=self.layout.vocab_padding_multiple,
            init=InitSpec(spec.init, spec.std), dtype=self.dtype, tied_key=spec.name if tied_apart else None,
            tied_primary=primary,
        )

    @property
    def dropout_now(self) -> float:
        """Probability of hidden dropout in the pass at hand: 0 during evaluation."""
        return self.model.hidden_dropout if self.stream.enabled else 0.0

    @cached_property
    def partition(self) -> SequencePartition:
        """Partition of a sequence, as this rank sees it."""
        return sequence_partition(self.ctx.mesh, self.ctx.rank, sequence_parallel=self.sequence_parallel)

    @cached_property
    def rotary(self) -> RotaryTables:
        """Tables of the model's rotary embedding, shared by its layers."""
        return RotaryTables(self.model)

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
