"""Weights and gradients in flat buckets: gradients are reduce-scattered during the backward passes, weights
all-gathered during the next forward pass (ZeRO stages 0 to 2, Rajbhandari et al., arXiv 1910.02054).

A step moves, for each parameter of a rank, one reduce-scatter of its gradient (fp32, or ``reduce_dtype``) and one
all-gather of its weight, in its own dtype: the least there is. Buffers are made once. With one shard (stage 0, or one
replica) the same code all-reduces, or moves nothing.

Stage 1 reduces a bucket when it has the gradients of all the step's micro-batches (``buckets.GradReadyTracker``).
Stage 2 (``shard_gradients``) keeps sums of this rank's shard only: a bucket's gradients live in a buffer of a pool
(``buckets.GradBufferPool``) while one backward pass of its chunk fills it, are reduced, and added to the shard. That is
one reduce-scatter per micro-batch, and less memory: 4 bytes per parameter become 4 / dp and two buffers.

Stage 3 and offload derive from :class:`ShardedParameters` (``ext.memory.held``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_port.core.dist.collectives import all_gather_single, reduce_scatter_single
from megatron_port.core.dist.device_streams import COMPUTE, access, in_flight
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import REPLICAS, SHARDED, MeshDims
from megatron_port.core.dist.record import ParameterRecord
from megatron_port.core.optim.buckets import (
    Bucket,
    BucketMemory,
    BucketPlan,
    GradBufferPool,
    GradReadyTracker,
    RecordedParameter,
    ReducedState,
    ShardRange,
    StateLayout,
    StateShard,
    clear,
    plan_buckets,
    shard_ranges,
    state_layouts,
    whole_gradients,
)
from megatron_port.core.optim.gradients import all_reduce_flat
from megatron_port.core.optim.rules import ADAMW, OptimizerRule
from megatron_port.core.optim.state_watch import StateWatch
from megatron_port.core.pipeline.schedules import Action


@dataclass(frozen=True, kw_only=True)
class ShardSettings:
    """How a rank's parameters are sharded over replicas."""

    master_dtype: torch.dtype
    """Dtype of masters and of gradient sums: fp32, or fp64 in an fp64 run."""
    split_state: bool
    """Shard masters and optimizer state over ``mesh.SHARDED`` (stages 1 to 3); else each replica has all."""
    capacity: int
    """Elements of a bucket, at most."""
    reduce_dtype: torch.dtype | None = None
    """Dtype of gradients between replicas; None: ``master_dtype``."""
    shard_gradients: bool = False
    """Stage 2; for schedules that do not split backward passes in two."""


class ShardedParameters:
    """Parameters of one rank, in buckets.

    Args:
        chunks: parameters with their records, by unit of each chunk, in forward order, each parameter once.
        rule: the optimizer's, which says what state each parameter has.
        shared: parameters that several units use.
    """

    updated_by = ""
    """The part of a step that makes the update, by name (``registry.STEP_PARTS``); empty: the rule's own."""

    def __init__(
        self, chunks: Sequence[Sequence[Sequence[RecordedParameter]]], ctx: ParallelContext, settings: ShardSettings, *,
        rule: OptimizerRule = ADAMW, shared: Collection[torch.Tensor] = (),
    ) -> None:
        self.ctx, self.master_dtype, self.rule = ctx, settings.master_dtype, rule
        self.zero_dims = ctx.mesh.dims(*SHARDED) if settings.split_state else frozenset()
        self.shards = ctx.mesh.size(self.zero_dims)
        self.reduce_dtype = settings.reduce_dtype or settings.master_dtype
        self.shard_gradients = settings.shard_gradients and self.shards > 1
        self.parameters = [pair for chunk in chunks for unit in chunk for pair in unit]
        self._index = {id(p): i for i, (_, p) in enumerate(self.parameters)}
        reduce_dims = self.zero_dims or ctx.mesh.dims(*REPLICAS)
        self.replicas = ctx.along(reduce_dims)
        """Replicas of dense layers; the copies of experts are some of them (``Bucket.group``)."""
        trained, frozen = self._plans(chunks, reduce_dims, {self._index[id(p)] for p in shared}, settings.capacity)
        self._make_buckets(trained, frozen)
        self._make_shards()
        self.watch = StateWatch(ctx.device)
        """Checks gradients and state; the base class is a no-op."""
        self._make_rounds(trained, [c for c, chunk in enumerate(chunks) for unit in chunk for _ in unit])
        self._hold = self._deferred = False
        self._open: list[Bucket] = []
        self._reducing: deque[Bucket] = deque()
        self.grad_buffer_pool: GradBufferPool | None = None
        if self.shard_gradients:
            size = max((plan.numel for plan in trained if not plan.dedicated_buffer and plan.shards > 1), default=0)
            self.grad_buffer_pool = GradBufferPool(size, self.master_dtype, self.buckets[0].weights.device)

    def _plans(
        self, chunks: Sequence[Sequence[Sequence[RecordedParameter]]], reduce_dims: MeshDims, shared: set[int],
        capacity: int,
    ) -> tuple[list[BucketPlan], list[BucketPlan]]:
        """Plan the buckets of trained and of frozen parameters; ``shared``: numbers of those that several units use."""
        units = [[(self._index[id(p)], record, p.numel()) for record, p in unit] for chunk in chunks for unit in chunk]
        trained, frozen = (
            plan_buckets(
                [[entry for entry in unit if entry[1].trainable is trainable] for unit in units], self.ctx.mesh,
                reduce_dims=reduce_dims, split=bool(self.zero_dims), capacity=capacity, shared=shared,
                align=self.rule.alignment,
            )
            for trainable in (True, False)
        )
        return list(trained), [replace(plan, frozen=True) for plan in frozen]

    def _memory(self, trained: Sequence[BucketPlan], frozen: Sequence[BucketPlan]) -> Sequence[BucketMemory]:
        """Return the allocation of each bucket's tensors."""
        return [BucketMemory()] * (len(trained) + len(frozen))

    def _make_buckets(self, trained: Sequence[BucketPlan], frozen: Sequence[BucketPlan]) -> None:
        """Allocate the buckets."""
        plans, ctx = [*trained, *frozen], self.ctx
        self.buckets = [
            Bucket(
                plan, self.parameters, self.master_dtype, ctx, state=self._layouts(plan), memory=memory,
                persistent=not (self.shard_gradients and plan.shards > 1),
            )
            for plan, memory in zip(plans, self._memory(trained, frozen))
        ]
        self.trained, self.frozen = self.buckets[: len(trained)], self.buckets[len(trained) :]
        """Buckets that updates change, and buckets of frozen weights."""
        self._tied = sorted((bucket for bucket in self.trained if ctx.tied_group(bucket.plan.tied) is not None),
                            key=lambda b: self.parameters[b.plan.slots[0].index][0].place)
        self._slot_of = {slot.index: (b, slot) for b, plan in enumerate(plans) for slot in plan.slots}
        self._bucket_of = {index: self.buckets[number] for index, (number, _) in self._slot_of.items()}

    def _make_shards(self) -> None:
        """Make the views of this rank's shards, and of persistent gradients."""
        self._persistent = {
            id(p): flat[slot.start : slot.start + slot.numel].view(p.shape)
            for bucket in self.buckets if (flat := bucket.gradients) is not None
            for slot in bucket.plan.slots for p in [self.parameters[slot.index][1]]
        }
        """By parameter: its view of the persistent gradients, if it has one."""
        owned = [(bucket, f) for bucket in self.buckets for f in shard_ranges(bucket.plan, shard=bucket.index)]
        self.pieces = [self._shard(bucket, f) for bucket, f in owned if not bucket.plan.frozen]
        self.shard_buckets = [bucket for bucket, _ in owned if not bucket.plan.frozen]  # by piece
        self.frozen_shards = [self._frozen_shard(bucket, f) for bucket, f in owned if bucket.plan.frozen]
        """Shards of frozen weights, which are their own masters."""
        self.reduced = [one for bucket in self.trained for one in self._reduced(bucket)]
        """State of rows and columns of the parameters of this rank's buckets."""

    def _make_rounds(self, trained: Sequence[BucketPlan], chunk_of: Sequence[int]) -> None:
        """Group buckets into rounds: stage 1 has one round per step, of all buckets; stage 2 one per backward pass, of
        its chunk's buckets. ``chunk_of``: each parameter's chunk."""
        groups: dict[int, list[tuple[int, list[int]]]] = {}
        for b, plan in enumerate(trained):
            c = chunk_of[plan.slots[0].index] if self.shard_gradients else 0
            groups.setdefault(c, []).append((b, [slot.index for slot in plan.slots]))
        names = [record.name for record, _ in self.parameters]
        self._rounds = {c: GradReadyTracker(g, names.__getitem__) for c, g in groups.items()}
        self._round_of = [self._rounds[c if self.shard_gradients else 0] for c in chunk_of]

    def _layouts(self, plan: BucketPlan) -> list[StateLayout]:
        """Return the layouts of the optimizer state of this rank's shard of a bucket."""
        if plan.frozen:
            return []
        shard = self.ctx.mesh.index(self.ctx.rank, plan.reduce_dims) if plan.shards > 1 else 0
        return state_layouts(plan, shard, [record for record, _ in self.parameters], self.rule)

    def _reduced(self, bucket: Bucket) -> Iterator[ReducedState]:
        for kind, layout in bucket.layouts.items():
            for r in () if kind.divided else layout.ranges:
                record = self.parameters[r.index][0]
                yield ReducedState(record, kind, bucket.state[kind][r.span].view(kind.place(record).local_shape))

    def _shard(self, bucket: Bucket, f: ShardRange) -> StateShard:
        local = slice(f.at - bucket.shard_slice.start, f.at - bucket.shard_slice.start + f.numel)
        record = self.parameters[f.index][0]
        state = {
            kind.name: bucket.state[kind][r.span] for kind in self.rule.state(record) if kind.divided
            for r in bucket.layouts[kind].ranges if r.index == f.index
        }
        return StateShard(record, f.start, bucket.shard[local], bucket.masters[local], bucket.sums[local], state)

    def _frozen_shard(self, bucket: Bucket, f: ShardRange) -> StateShard:
        weight = bucket.shard[f.at - bucket.shard_slice.start : f.at - bucket.shard_slice.start + f.numel]
        return StateShard(self.parameters[f.index][0], f.start, weight, weight, bucket.sums, {})

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def whole(self) -> bool:
        """Whether a rank holds all weights from one step to the next, including other replicas' shards."""
        return True

    def permanent(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return a parameter's memory if it is persistent and in the masters' dtype; else None."""
        return parameter.detach() if parameter.dtype == self.master_dtype else None

    def set_weight(self, parameter: torch.Tensor, value: torch.Tensor, pieces: Sequence[StateShard]) -> None:
        """Set a parameter, of which this rank owns ``pieces``, to a value of its shape."""
        if value.data_ptr() != parameter.data_ptr():
            parameter.copy_(value)

    def loaded(self, on_final: Callable[[Any], None]) -> None:
        """Note that weights, masters and state were set from outside. ``on_final``: changes the final gradients of a
        bucket whose state is not on the device."""

    def wait_for_state(self) -> None:
        """Wait until masters and state may be read where they live."""

    # -- gradients ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(self, micro_batches: int, *, early: bool) -> None:
        """Clear the gradients of a step. ``early``: reduce buckets as they become complete; else all in :meth:`finish`,
        for which stage 2 needs, this once, as much memory as stage 1."""
        self._hold = not early
        self.watch.begin(early=early)
        for bucket in self.trained:
            access(COMPUTE, "sums are cleared", writes=[bucket.sums])
        clear([view for bucket in self.trained for view in bucket.begin()])
        passes = 1 if self.shard_gradients and early else micro_batches
        for part in self._rounds.values():
            part.begin(passes, early=early and self.replicas is not None)

    def gradient_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the view to add a gradient to, in the parameter's shape; call :meth:`added` when it has been added."""
        gradient, uninitialized = self._gradient_of(parameter)
        return gradient.zero_() if uninitialized else gradient

    def uninitialized_gradient_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return :meth:`gradient_of` to write over, while it is uninitialized; else None."""
        bucket = self._bucket_of[index := self._index[id(parameter)]]
        # A bucket without memory for its gradients gets a buffer at its first one.
        if index not in bucket.uninitialized and bucket.gradients is not None and bucket.reducing is None:
            return None
        gradient, uninitialized = self._gradient_of(parameter)
        return gradient if uninitialized else None

    def _gradient_of(self, parameter: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Return a parameter's gradient and whether it is uninitialized, which it no longer counts as from now on."""
        gradient = self._persistent.get(id(parameter))
        if gradient is None:
            gradient = self._buffered_gradient(parameter)
        access(COMPUTE, "a gradient is added", writes=[gradient])
        index = self._index[id(parameter)]
        return gradient, self._bucket_of[index].uninitialized.pop(index, None) is not None

    def _buffered_gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the view of a gradient that is not persistent; a bucket without a buffer gets one here."""
        number, slot = self._slot_of[self._index[id(parameter)]]
        bucket = self.buckets[number]
        while bucket.reducing is not None:
            self._finish_reduction()
        if bucket.gradients is None:
            if bucket.grad_buffer is not None:
                bucket.gradients = bucket.grad_buffer
            else:
                assert self.grad_buffer_pool is not None
                bucket.gradients = self.grad_buffer_pool.acquire(bucket.plan.numel, self._free_grad_buffer)
                self._open.append(bucket)
            clear(bucket.forget())
        return bucket.gradients[slot.start : slot.start + slot.numel].view(parameter.shape)

    def reduced_with(self, parameter: torch.Tensor) -> int:
        """Return the number of the bucket with which a gradient is reduced; always 0 without other replicas."""
        return 0 if self.replicas is None else self._slot_of[self._index[id(parameter)]][0]

    def added(self, parameter: torch.Tensor) -> None:
        """Note that a gradient has been added to :meth:`gradient_of`."""
        index = self._index[id(parameter)]
        for number in self._round_of[index].added(index):
            self._full(self.buckets[number])

    def _full(self, bucket: Bucket) -> None:
        """Reduce a bucket whose gradients are complete."""
        self._start(bucket)

    def end_pass(self, chunk: int) -> None:
        """End a backward pass of a chunk; under stage 2, start reducing its gradients."""
        part = self._rounds.get(chunk) if self.shard_gradients and not self._hold else None
        if part is not None:
            for number in part.rest():
                self._start(self.buckets[number])
            part.begin(1, early=True)

    def _free_grad_buffer(self) -> bool:
        """Release a gradient buffer; return whether one could be. If no reduction is under way, reduce the bucket that
        was opened first as it is; gradients added to it later are reduced again and added to the same sum. All replicas
        do this at the same place."""
        if self._hold:
            return False
        if not self._reducing and self._open:
            self._start(self._open[0])
        return self._finish_reduction()

    def _start(self, bucket: Bucket) -> None:
        group = bucket.group
        if bucket.uninitialized:
            bucket.close()
        if group is None or bucket.gradients is None or bucket.reducing is not None:
            return
        if bucket in self._open:
            self._open.remove(bucket)
        flat = bucket.gradients
        if self.reduce_dtype != flat.dtype:
            bucket.reduce_buffer = flat = flat.to(self.reduce_dtype)
        self.watch.starting(bucket, flat)
        if bucket.shards == 1:
            work = dist.all_reduce(flat, group=group, async_op=True)
        else:
            work = reduce_scatter_single(flat[bucket.shard_slice], flat, group=group, async_op=True)
        bucket.reducing = in_flight(work, "gradient reduction", reads=[flat], writes=[flat[bucket.shard_slice]])
        self._reducing.append(bucket)

    @torch.no_grad()
    def _finish_reduction(self) -> bool:
        """Wait for the oldest reduction under way and add its result to the sums; return whether there was one."""
        if not self._reducing:
            return False
        bucket = self._reducing.popleft()
        assert bucket.reducing is not None and bucket.gradients is not None
        bucket.reducing.wait()
        bucket.reducing = None
        access(COMPUTE, "reduced gradients are added up", reads=[bucket.gradients], writes=[bucket.sums])
        flat = bucket.gradients if bucket.reduce_buffer is None else bucket.reduce_buffer
        reduced = flat[bucket.shard_slice]
        if not bucket.persistent:
            assert self.grad_buffer_pool is not None
            self.watch.release([bucket])
            bucket.add_reduced(reduced)
            if bucket.grad_buffer is None:
                self.grad_buffer_pool.release(bucket.gradients)
            bucket.gradients = None
        elif bucket.reduce_buffer is not None:
            bucket.sums.copy_(reduced)
        bucket.reduce_buffer = None
        self._reduction_finished(bucket)
        self.watch.hold([bucket])
        return True

    def _reduction_finished(self, bucket: Bucket) -> None:
        """Hook of subclasses: a bucket has been reduced."""

    @torch.no_grad()
    def finish(self) -> None:
        """Start the reductions left, wait for all, then all-reduce shards of replicated, partial and tied gradients."""
        for part in self._rounds.values():
            for number in part.rest():
                self._start(self.buckets[number])
        while self._finish_reduction():
            pass
        if self.grad_buffer_pool is not None:
            self.grad_buffer_pool.trim()
        self.watch.reduced(self.trained)
        self._reduce_shards()
        self.watch.hold(self.trained)

    def _reduce_shards(self) -> None:
        """All-reduce this rank's shards over their copies, along the model's axes where they are partial, and over the
        stages that hold a tied copy."""
        ctx = self.ctx
        partial: dict[MeshDims, list[torch.Tensor]] = {}
        for bucket in self.trained:
            if not bucket.persistent:
                bucket.end()
            copies = ctx.along(bucket.plan.copies)
            if copies is not None:
                dist.all_reduce(bucket.sums, group=copies)
            for part in bucket.plan.partial:
                start, stop = max(part.start, bucket.shard_slice.start), min(part.stop, bucket.shard_slice.stop)
                if start < stop:  # alike in the group: its ranks have equal buckets and the same shard
                    local = bucket.sums[start - bucket.shard_slice.start : stop - bucket.shard_slice.start]
                    partial.setdefault(part.dims, []).append(local)
        for dims in sorted(partial, key=sorted):
            group = ctx.along(dims)
            if group is not None:
                all_reduce_flat(partial[dims], group)
        for bucket in self._tied:  # in one order on every stage, since a bucket holds one tied parameter
            dist.all_reduce(bucket.sums, group=ctx.tied_group(bucket.plan.tied))

    def whole_gradients(self) -> list[tuple[ParameterRecord, torch.Tensor]]:
        """Return the full reduced gradient of each parameter (for comparisons: gathers all shards). Collective."""
        return whole_gradients(self.trained, self.parameters)

    def local_gradients(self) -> list[tuple[ParameterRecord, torch.Tensor]]:
        """Return this rank's unreduced gradients; only after ``begin(early=False)`` and before ``finish``."""
        return [(record, self.gradient_of(p)) for record, p in self.parameters if record.trainable]

    # -- weights -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def copy_masters_to_weights(self) -> None:
        """Copy the masters on the device to this rank's shard of the weights, in the weights' dtype."""
        for bucket in self._updated_here():
            if bucket.masters.dtype != bucket.shard.dtype:
                bucket.shard.copy_(bucket.masters)

    def _updated_here(self) -> Sequence[Bucket]:
        """Return the buckets whose masters are on the device."""
        return self.trained

    @property
    def gathers_after_update(self) -> bool:
        """Whether :meth:`start_gather` brings the other replicas' weights."""
        return self.shards > 1

    @property
    def keeps_weights(self) -> bool:
        """Whether weights are whole throughout a step."""
        return True

    def plan_gathers(self, chunks: Sequence[Any], actions: Sequence[Action]) -> None:
        """Hook of stage 3: plan the gathers of the weights that the actions of a stage use."""

    def defer_gather(self) -> None:
        """Gather the updated weights at the first :meth:`wait`, or at :meth:`start_gather`. A captured step gathers
        them at its beginning, since a CUDA graph cannot end with work under way."""
        self._deferred = self.shards > 1

    def gathers_itself(self) -> None:
        """Note that a replayed graph gathers the weights, so that :meth:`wait` need not."""
        self._deferred = False

    @torch.no_grad()
    def start_gather(self) -> None:
        """Start gathering the updated weights, in the order in which the next forward pass needs them."""
        self._deferred = False
        for bucket in reversed(self.trained):
            if bucket.shards > 1:
                shard = bucket.weights[bucket.shard_slice]
                work = all_gather_single(bucket.weights, shard, group=bucket.group, async_op=True)
                bucket.gathering = in_flight(work, "weight gather", reads=[shard], writes=[bucket.weights])

    def wait(self, buckets: Sequence[Bucket] | None = None) -> None:
        """Wait until the weights of these buckets (default: all) have been gathered."""
        if self._deferred:
            self.start_gather()
        for bucket in self.buckets if buckets is None else buckets:
            if bucket.gathering is not None:
                bucket.gathering.wait()
                bucket.gathering = None
                self.watch.gathered(bucket)
            access(COMPUTE, "weights are used", reads=[bucket.weights])

    def _buckets_of(self, unit: nn.Module) -> list[int]:
        """Return the numbers of the buckets that hold a unit's parameters."""
        return sorted({self._slot_of[self._index[id(p)]][0] for p in unit.parameters()})

    def wait_before(self, unit: nn.Module) -> None:
        """Register a forward pre-hook on a unit that waits for the gathers of its buckets alone."""
        mine = [self.buckets[n] for n in self._buckets_of(unit)]
        if mine:
            unit.register_forward_pre_hook(lambda module, inputs: self.wait(mine))

    def named_weights(self) -> Iterator[RecordedParameter]:
        """Yield each parameter with its full weights there; collective where they are gathered for that (stage 3)."""
        self.wait()
        yield from self.parameters
