"""Parameters whose weights are whole only while a unit of the model uses them (ZeRO stage 3), or whose masters and
optimizer state live outside of the device's memory (offload), or both.

Each keeps what the other leaves: stage 3 this rank's shard of the weights (``memory.zero3``), an offload the state of
buckets (``memory.offload``), and with both the shards of the weights may live on the host too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from megatron_port.core.config.features import OffloadConfig
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.engine.native_state import Units
from megatron_port.core.errors import ConfigError
from megatron_port.core.optim.buckets import (
    Bucket,
    BucketMemory,
    BucketPlan,
    RecordedParameter,
    StateLayout,
    StateShard,
)
from megatron_port.core.optim.rules import OptimizerRule, StateKind, rule_of
from megatron_port.core.optim.sharded import ShardedParameters, ShardSettings
from megatron_port.core.pipeline.schedules import Action, Kind
from megatron_port.ext.memory.offload import Offload
from megatron_port.ext.memory.zero3 import UnitGather, WeightSharding


class HeldMemory(BucketMemory):
    """Memory of one bucket: its weights in a ``window`` (None: in memory of their own), its state where ``offload``
    keeps that of bucket ``number``."""

    def __init__(self, window: torch.Tensor | None, offload: Offload | None, number: int) -> None:
        self.window, self.offload, self.number = window, offload, number

    @property
    def _offloaded(self) -> bool:
        return self.offload is not None and self.offload.holds(self.number)

    def weights(self, plan: BucketPlan, like: torch.Tensor) -> torch.Tensor:
        """Return memory for all weights, of the dtype of ``like``."""
        return super().weights(plan, like) if self.window is None else self.window

    def part(self, plan: BucketPlan, weights: torch.Tensor, shard_slice: slice) -> torch.Tensor:
        """Return this rank's part of the weights: in memory of its own, if they are in a window."""
        part = super().part(plan, weights, shard_slice) if self.window is None else weights[shard_slice].clone()
        if self.offload is not None and self.offload.weights_on_host and (plan.frozen or self._offloaded):
            part = self.offload.host_zeros(part.numel(), part.dtype).copy_(part)
        return part

    def state(
        self, part: torch.Tensor, layouts: Sequence[StateLayout], master_dtype: torch.dtype
    ) -> tuple[torch.Tensor, dict[StateKind, torch.Tensor]]:
        """Return the masters of this rank's part and the rule's flat tensors: zeros."""
        if self.offload is not None and self._offloaded:
            return self.offload.allocate(self.number)
        return super().state(part, layouts, master_dtype)


class HeldParameters(ShardedParameters):
    """Parameters of one rank whose weights or state are not held as a plain step holds them.

    Args:
        weights: how the weights are sharded; None: each rank has all.
        offload: where masters and optimizer state live.
    """

    def __init__(
        self, chunks: Sequence[Sequence[Sequence[RecordedParameter]]], ctx: ParallelContext, settings: ShardSettings, *,
        rule: OptimizerRule, shared: Collection[torch.Tensor], weights: WeightSharding | None, offload: OffloadConfig,
    ) -> None:
        self._weights, self._offload_config = weights, offload
        self.offload: Offload | None = None
        self.unit_gather: UnitGather | None = None
        super().__init__(chunks, ctx, settings, rule=rule, shared=shared)
        if self.offload is not None:
            self.updated_by = "offloaded update"

    def _memory(self, trained: Sequence[BucketPlan], frozen: Sequence[BucketPlan]) -> list[BucketMemory]:
        """Make what offloads the buckets' state, and what gathers their weights."""
        plans, weight = [*trained, *frozen], self.parameters[0][1]
        if self._offload_config.optimizer != "none":
            layouts = [self._layouts(plan) for plan in trained]
            self.offload = Offload(self._offload_config, trained, layouts=layouts, weight=weight)
        windows: Sequence[torch.Tensor | None] = [None] * len(plans)
        if self._weights is not None and (self.shards > 1 or self._weights.on_host):
            streams = None if self.offload is None else self.offload.ring.streams
            self.unit_gather = UnitGather(plans, self._weights, like=weight, streams=streams)
            windows = self.unit_gather.memory(plans)
        return [HeldMemory(window, self.offload, number) for number, window in enumerate(windows)]

    def _make_buckets(self, trained: Sequence[BucketPlan], frozen: Sequence[BucketPlan]) -> None:
        super()._make_buckets(trained, frozen)
        if self.offload is not None:
            self.offload.attach(self.buckets)
        if self.unit_gather is not None:
            self.unit_gather.attach(self.buckets)

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def whole(self) -> bool:
        """Whether a rank holds all weights from one step to the next."""
        return self.unit_gather is None

    def permanent(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return a parameter's memory if it is persistent and in the masters' dtype; else None."""
        return super().permanent(parameter) if self.whole else None

    def set_weight(self, parameter: torch.Tensor, value: torch.Tensor, pieces: Sequence[StateShard]) -> None:
        """Set a parameter, or where its memory is not persistent this rank's shards of it, to a value of its shape."""
        if self.whole:
            super().set_weight(parameter, value, pieces)
            return
        for piece in pieces:
            piece.weight.copy_(value.view(-1)[piece.start : piece.start + piece.weight.numel()])

    def loaded(self, on_final: Callable[[Any], None]) -> None:
        """Note that weights, masters and state were set from outside. ``on_final``: changes the final gradients of a
        bucket whose state is offloaded."""
        if self.unit_gather is not None:
            self.unit_gather.release()
        if self.offload is not None:
            self.offload.on_final = on_final
            self.offload.changed()

    def wait_for_state(self) -> None:
        """Wait until offloaded state may be read where it lives."""
        if self.offload is not None:
            self.offload.settle()

    # -- gradients ---------------------------------------------------------------------------------------------------

    def _full(self, bucket: Bucket) -> None:
        """Reduce a bucket, and end the reductions that are complete, so that offloaded ones start their way to the
        host."""
        super()._full(bucket)
        while self.offload is not None and self._reducing and self._reducing[0].persistent:
            work = self._reducing[0].reducing
            if work is None or not work.is_completed():
                break
            self._finish_reduction()

    def _reduction_finished(self, bucket: Bucket) -> None:
        plan = bucket.plan
        if self.offload is not None and bucket.persistent and not (plan.copies or plan.partial or plan.tied):
            self.offload.reduced(bucket)  # nothing will be added to these sums

    # -- weights -----------------------------------------------------------------------------------------------------

    def _updated_here(self) -> list[Bucket]:
        offload = self.offload
        return self.trained if offload is None else [b for n, b in enumerate(self.trained) if not offload.holds(n)]

    @property
    def gathers_after_update(self) -> bool:
        """Whether :meth:`start_gather` brings the other replicas' weights: not under stage 3, which gathers each unit
        when it is used."""
        return self.whole and super().gathers_after_update

    @property
    def keeps_weights(self) -> bool:
        """Whether weights are whole throughout a step."""
        return self.unit_gather is None or self.unit_gather.keep

    def plan_gathers(self, chunks: Sequence[Any], actions: Sequence[Action]) -> None:
        """Tell stage 3 which units a step uses, in order, to gather them ahead."""
        if self.unit_gather is not None:
            self.unit_gather.plan(unit_uses(chunks, actions))

    @torch.no_grad()
    def start_gather(self) -> None:
        """Start gathering the updated weights; under stage 3 forget those that were gathered before the update."""
        if self.unit_gather is None:
            super().start_gather()
            return
        self.gathers_itself()
        self.unit_gather.release()

    def wait_before(self, unit: nn.Module) -> None:
        """Make every forward pass of a module, under stage 3 every backward pass too, wait for its weights, and for
        nothing else."""
        if self.unit_gather is None:
            super().wait_before(unit)
        elif numbers := self._buckets_of(unit):
            self.unit_gather.register(unit, numbers)

    def named_weights(self) -> Iterator[RecordedParameter]:
        """Yield each parameter while its weights are whole: under stage 3 until the next one is asked for.

        Collective over the shard group under stage 3.
        """
        self.wait()
        for i, (record, p) in enumerate(self.parameters):
            if self.unit_gather is not None:
                self.unit_gather.make_whole(self._slot_of[i][0])
            yield record, p


def unit_uses(chunks: Sequence[Any], actions: Sequence[Action]) -> list[nn.Module]:
    """Return the units whose weights the actions of a stage read, in order.

    Deferred weight products read inputs and output gradients, no weights; nor do backward passes of units with
    ``backward_reads_weights = False``. Units with ``training_only`` are not used while they are in evaluation mode.
    """
    units = [[u for u in c.units if u.training or not getattr(u, "training_only", False)] for c in chunks]
    backward = [[u for u in reversed(mine) if getattr(u, "backward_reads_weights", True)] for mine in units]
    out: list[nn.Module] = []
    for action in actions:
        if action.kind is Kind.FORWARD:
            out += units[action.chunk]
        elif action.kind is not Kind.WEIGHT:
            out += backward[action.chunk]
    return out


def held_parameters(
    chunks: Sequence[Any], by_unit: Sequence[Units], config: RunConfig, ctx: ParallelContext, settings: ShardSettings,
    shared: Collection[torch.Tensor],
) -> HeldParameters:
    """Return a rank's parameters as ``layout.zero_stage`` 3 or ``offload`` say; ``by_unit``: those of each unit of each
    chunk.

    Raises:
        ConfigError: a chunk has parameters outside its units, which stage 3 would never gather.
        EnvironmentFault: the disk is too small, or cannot be written.
    """
    return HeldParameters(
        by_unit, ctx, settings, rule=rule_of(config.optimizer), shared=shared,
        weights=_weight_sharding(chunks, by_unit, config, ctx), offload=config.offload,
    )


def _weight_sharding(
    chunks: Sequence[Any], by_unit: Sequence[Units], config: RunConfig, ctx: ParallelContext
) -> WeightSharding | None:
    """How stage 3 shards the weights; None: another stage.

    Raises ConfigError where a chunk has parameters outside its units, which would never be gathered.
    """
    if config.layout.zero_stage < 3:
        return None
    topology, ends, at = ctx.topology, [], 0
    for c, units in enumerate(by_unit):
        if units[0]:
            raise ConfigError(
                f"layout.zero_stage 3: {units[0][0][0].name} is a parameter of a chunk and of none of its units, "
                "by which weights are gathered; put it into a unit, or use zero_stage 2"
            )
        virtual = topology.virtual_stage(ctx.coords.pp, c)
        ends += [at + 1] if virtual == 0 else []
        at += len(units)
        further = sum(getattr(unit, "training_only", False) for unit in chunks[c].units)
        ends += [at - further - 1] if virtual == topology.virtual_stages - 1 else []
    return WeightSharding(ends, keep=config.layout.reshard == "step", on_host=config.offload.weights == "cpu")
