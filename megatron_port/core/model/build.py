"""Context that the modules of a stage are built with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from megatron_port.core.config.features import NO_ADAPTERS, NO_QUANTISATION, FineTuningConfig, QuantisationConfig
from megatron_port.core.config.schema import LayoutConfig, ModelConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import REPLICAS
from megatron_port.core.dist.positions import SequencePartition, sequence_partition
from megatron_port.core.dist.record import SEQUENCE, InitSpec, Shard, attach, make_record
from megatron_port.core.layers.attention import ContextAttention
from megatron_port.core.layers.cross_entropy import TokenLoss, vocab_parallel_cross_entropy
from megatron_port.core.layers.embedding import padded_vocab_size, vocab_parameter
from megatron_port.core.layers.linear import (
    ColumnParallelLinear,
    Linear,
    LinearContext,
    LinearKernels,
    RowParallelLinear,
    Rows,
    UnsplitLinear,
)
from megatron_port.core.layers.providers import Providers
from megatron_port.core.layers.step import StepSlot
from megatron_port.core.model.loss import StageLoss
from megatron_port.core.model.residual import ResidualStream
from megatron_port.core.model.rotary import RotaryTables
from megatron_port.core.model.spec import LinearSpec, ParameterSpec, Rotation
from megatron_port.core.registry import PARTS


class Recompute(Protocol):
    """Activation recompute (``memory.recompute``)."""

    def __call__(self, function: Callable[..., torch.Tensor], *inputs: torch.Tensor, step: StepSlot) -> torch.Tensor:
        """Run ``function(*inputs)`` keeping only its inputs; its modules see the same micro-batch both times."""


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Settings of training that the modules of a stage need beside the model's sizes."""

    loss: TokenLoss = vocab_parallel_cross_entropy
    """Loss of the head while training; evaluations take the cross-entropy."""
    objective: StageLoss = field(default_factory=StageLoss)
    """Loss of the last stage from its logits."""
    z_loss: float = 0.0
    """Factor of log²Z in the loss of the model's own logits while training."""
    recompute: str = "none"
    """none | selective | full, for all layers."""
    layer_activations: Mapping[int, Any] = field(default_factory=dict)
    """Decisions (``memory.sites.LayerActivations``) by the index of the layer, where ``recompute`` is none."""
    head_chunk: int = 0
    """Tokens whose logits exist at once (``memory.chunked_head``); 0: all."""
    position_reset: bool = False
    """Learned positions are counted from each document's start."""
    fine_tuning: FineTuningConfig = NO_ADAPTERS
    """Which linears have adapters."""
    quantisation: QuantisationConfig = NO_QUANTISATION
    """Few bits that the weights of the layers' linears are to have."""


class BuildContext:
    """Parameters, linear layers and shared parts for the modules of a stage, which keep what they need of them.

    No module keeps the context itself.

    Args:
        step: where the modules find the micro-batch in flight.
        dtype: of parameters and activations.
        options: settings of training; None: the defaults.
        partition: positions that this rank holds; None: those of the layout.
    """

    def __init__(
        self, *, model: ModelConfig, layout: LayoutConfig, ctx: ParallelContext, providers: Providers,
        step: StepSlot, dtype: torch.dtype, options: BuildOptions | None = None,
        partition: SequencePartition | None = None,
    ) -> None:
        options = options or BuildOptions()
        self.fine_tuning, self.objective, self.z_loss = options.fine_tuning, options.objective, options.z_loss
        self.model, self.ctx, self.providers, self.step, self.stream = model, ctx, providers, step, step.stream
        self.dtype, self.loss, self.position_reset = dtype, options.loss, options.position_reset
        self.sequence_parallel = layout.sequence_parallel and ctx.size("tp") > 1
        self._recompute, self.cp_method, self.head_chunk = options.recompute, layout.cp_method, options.head_chunk
        self.layer_activations = options.layer_activations
        self.parking = self._parking()
        self.padding_multiple = layout.vocab_padding_multiple
        # Of the layers' linears; embedding, head and attention stay in the compute dtype.
        kernels, narrow = _kernels(providers, options.quantisation), providers.fp8
        self.weight_copies = None if narrow is None else narrow.weight_copies()
        self.linears = LinearContext(ctx, self.sequence_parallel, dtype, kernels)
        overlaps = layout.tp_overlap_chunks > 1 or layout.tp_exchange != "collective"
        self.overlapped = layout if overlaps and ctx.size("tp") > 1 else None
        if partition is None:
            partition = sequence_partition(
                ctx.mesh, ctx.rank, order=layout.cp_order, sequence_parallel=self.sequence_parallel
            )
        self.partition = partition
        self.residual = ResidualStream(
            partition, step, model.hidden_dropout, model.hidden_size, providers.bias_dropout_add,
            providers.bias_dropout_add_norm, model.residual_multiplier,
        )
        self._rotary: dict[Rotation, RotaryTables | None] = {}

    def _parking(self) -> Any:
        """Return the memory of swapped and partitioned activations (``memory.site_tape.ParkingPlaces``), if any."""
        if not self.layer_activations:
            return None
        # Under sequence parallelism tensor-parallel ranks hold no copies that could be partitioned.
        group = None if self.sequence_parallel else self.ctx.over("tp")
        return PARTS.function("activation swap and partition")(self.ctx.device, group)

    def recompute(self, what: str) -> Recompute | None:
        """Return what computes ``what`` again in backward passes: selective (attention's core) or full (a layer);
        None: it keeps its activations."""
        found: Recompute | None = None
        if self._recompute == what:
            found = PARTS.function("activation recompute")
        return found

    def context_attention(self) -> ContextAttention | None:
        """Return how attention reaches the positions of other context-parallel ranks; None: there are none.

        Raises:
            ConfigError: the provider of attention cannot serve the method.
        """
        group = self.ctx.over("cp")
        if group is None:  # one rank, or none are connected: nothing is computed then
            return None
        found: ContextAttention = PARTS.function("context-parallel attention")(self.cp_method, group, self.providers)
        return found

    def rotary(self, rotation: Rotation) -> RotaryTables | None:
        """Return the tables that all layers of a kind of rotation share; None: they need none."""
        if rotation not in self._rotary:
            # The tables carry attention_scale too.
            needed = rotation != "none" or self.model.attention_scale > 0
            self._rotary[rotation] = RotaryTables(self.model, rotation, self.dtype) if needed else None
        return self._rotary[rotation]

    def column(
        self, layer: str, spec: LinearSpec, *, rows: tuple[Rows, Rows] | None = None, skip_bias: bool = False
    ) -> Linear:
        """Build the linear layer of a spec with its outputs split over the tensor-parallel ranks."""
        if spec.rank:
            make = PARTS.function("low-rank column linear")
            factored: Linear = make(layer, spec, self, rows=rows, skip_bias=skip_bias)
            return factored
        adapter = self.adapter(layer, spec)
        plain = self.overlapped is None or adapter is not None
        make = ColumnParallelLinear if plain else partial(PARTS.function("overlapped column linear"), self.overlapped)
        made: ColumnParallelLinear = make(layer, spec, self.linears, rows=rows, skip_bias=skip_bias)
        made.adapter = adapter
        return made

    def row(self, layer: str, spec: LinearSpec) -> Linear:
        """Build the linear layer of a spec with inputs split over tensor-parallel ranks; the caller adds its bias."""
        if spec.rank:
            factored: Linear = PARTS.function("low-rank row linear")(layer, spec, self)
            return factored
        adapter = self.adapter(layer, spec)
        plain = self.overlapped is None or adapter is not None
        make = RowParallelLinear if plain else partial(PARTS.function("overlapped row linear"), self.overlapped)
        made: RowParallelLinear = make(layer, spec, self.linears, skip_bias=True)
        made.adapter = adapter
        return made

    def whole(self, layer: str, spec: LinearSpec) -> Linear:
        """Build the linear layer of a spec that every tensor-parallel rank has all of; the caller adds its bias."""
        made = UnsplitLinear(layer, spec, self.linears)
        made.adapter = self.adapter(layer, spec)
        return made

    def divided(self, spec: ParameterSpec, layer: str = "") -> nn.Parameter:
        """Build a parameter of a norm or an adapter: whole, or this rank's rows, columns or heads."""
        if spec.split is None:
            return self.unsplit(spec, layer)
        shared = spec.shared_numel(self.ctx.size("tp")) > 0
        record = make_record(
            f"{layer}.{spec.name}", spec.shape, self.ctx, init=InitSpec(spec.init, spec.std), decay=spec.decay,
            shards=(Shard(spec.split.dim, ("kv_heads",) if shared else ("tp",)),),
            partial_over=(*REPLICAS, "kv_copies") if shared else REPLICAS,
        )
        return self.linears.parameter(record)

    def adapter(self, layer: str, spec: LinearSpec) -> nn.Module | None:
        """Build the adapters of the linear layer of a spec (``weights.adapters``); None: it has none."""
        found: nn.Module | None = None
        if self.fine_tuning.enabled:
            found = PARTS.function("adapter")(layer, spec, self)
        return found

    def unsplit(self, spec: ParameterSpec, layer: str = "") -> nn.Parameter:
        """Build a parameter that every tensor-parallel rank holds in full; ``layer`` is the prefix of its name."""
        partial = spec.is_partial(self.ctx.size("tp"), self.sequence_parallel)
        record = make_record(
            f"{layer}.{spec.name}" if layer else spec.name, spec.shape, self.ctx, init=InitSpec(spec.init, spec.std),
            decay=spec.decay, partial_over=SEQUENCE if partial else REPLICAS,
        )
        return self.linears.parameter(record)

    def per_head(self, spec: ParameterSpec, layer: str) -> nn.Parameter:
        """Build a parameter of one element per query head, which tensor-parallel ranks divide."""
        record = make_record(
            f"{layer}.{spec.name}", spec.shape, self.ctx, init=InitSpec(spec.init, spec.std), decay=spec.decay,
            shards=(Shard(0, ("tp",)),),
        )
        return self.linears.parameter(record)

    def vocabulary_bias(self, spec: ParameterSpec) -> nn.Parameter:
        """Build the bias of the logits: those of this rank's rows of the head's matrix."""
        padded = padded_vocab_size(spec.numel, tp=self.ctx.size("tp"), multiple=self.padding_multiple)
        record = make_record(
            spec.name, spec.shape, self.ctx, init=InitSpec(spec.init), decay=spec.decay, shards=(Shard(0, ("tp",)),),
            padded=padded,
        )
        return attach(nn.Parameter(torch.zeros(record.local_shape, dtype=self.dtype, device=self.ctx.device)), record)

    def table(self, spec: ParameterSpec, *, tied_apart: bool, primary: bool = True) -> nn.Parameter:
        """Build the token table or the head's matrix.

        ``tied_apart``: another stage has a copy; ``primary``: this is the one that is counted and saved.
        """
        return vocab_parameter(
            spec.name, *spec.shape, ctx=self.ctx, padding_multiple=self.padding_multiple,
            init=InitSpec(spec.init, spec.std), dtype=self.dtype, tied_key=spec.name if tied_apart else None,
            tied_primary=primary,
        )


def _kernels(providers: Providers, quantisation: QuantisationConfig) -> LinearKernels:
    """Return the products of the layers' linears: in the compute dtype, in 8 bits, or of weights of few bits."""
    found = providers.products
    if quantisation.enabled:
        found = PARTS.function("few-bit matmuls")(quantisation)
    elif providers.fp8 is not None:
        found = providers.fp8.linear_kernels()
    return found
