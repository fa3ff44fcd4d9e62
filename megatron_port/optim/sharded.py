"""Weights and gradients in flat buckets; gradients reduced to shards while backward passes run, weights gathered
while the next forward pass does (ZeRO stage 1, Rajbhandari et al., arXiv 1910.02054).

A step moves, for each parameter of a rank, one reduce-scatter of its gradient (fp32, or ``reduce_dtype``) and one
all-gather of its weight, in its own dtype: the least there is. Buffers are made once. With one shard (ZeRO stage 0, or
one replica) the same code all-reduces, or moves nothing.

When may a bucket be reduced? When every gradient of the step has been added to it. Each use of a parameter in a
micro-batch adds once; how often that is, the first step counts (its reductions start at its end), and from then on
a bucket starts as soon as all its parameters have had their number times micro-batches. Buckets start in one order on
all replicas. A gradient that comes later than that would be lost: it is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from megatron_port.optim.buckets import BucketPlan, fragments, plan_buckets
from megatron_port.parallel.compat import all_gather_single, reduce_scatter_single
from megatron_port.parallel.context import ParallelContext
from megatron_port.parallel.record import ParameterRecord

Recorded = tuple[ParameterRecord, nn.Parameter]


@dataclass(frozen=True)
class Piece:
    """A range of one parameter that this rank owns; the tensors are views, 1-D, of the same length."""

    record: ParameterRecord
    start: int
    """First element of the flattened local tensor."""
    weight: torch.Tensor
    """In the model's dtype."""
    master: torch.Tensor
    """fp32 or wider; the same memory as ``weight`` where that is as wide."""
    gradient: torch.Tensor
    """fp32 or wider: the sum over micro-batches and replicas, once ``finish`` has returned."""


class Bucket:
    """The memory of one bucket and what is under way on it."""

    def __init__(self, plan: BucketPlan, parameters: Sequence[Recorded], wide: torch.dtype, shard: int, shards: int):
        first = parameters[plan.slots[0].index][1]
        self.plan, self.shards = plan, shards
        self.weights = torch.zeros(plan.numel, dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros(plan.numel, dtype=wide, device=first.device)
        size = plan.numel // shards
        self.own = slice(shard * size, (shard + 1) * size)
        own_weights = self.weights[self.own]
        self.masters = own_weights if first.dtype == wide else torch.zeros_like(own_weights, dtype=wide)
        self.reducing: dist.Work | None = None
        self.narrow: torch.Tensor | None = None
        self.gathering: dist.Work | None = None
        for slot in plan.slots:
            p = parameters[slot.index][1]
            span = slice(slot.start, slot.start + slot.numel)
            self.weights[span].copy_(p.detach().reshape(-1))
            p.data = self.weights[span].view(p.shape)
            p.main_grad = self.gradients[span].view(p.shape)  # type: ignore[attr-defined]


class ShardedParameters:
    """The parameters of one rank, in buckets.

    Args:
        chunks: the recorded parameters of each chunk, in forward order, each parameter once.
        wide: dtype of masters and gradient sums.
        shards: over how many replicas masters and moments are split: dp, or 1.
        capacity: elements of a bucket.
        reduce_dtype: of gradients between replicas; None: ``wide``.
    """

    def __init__(
        self, chunks: Sequence[Sequence[Recorded]], ctx: ParallelContext, *, wide: torch.dtype, shards: int,
        capacity: int, reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.ctx, self.shards, self.wide = ctx, shards, wide
        self.reduce_dtype = wide if reduce_dtype is None else reduce_dtype
        self.parameters = [pair for chunk in chunks for pair in chunk]
        shard = ctx.coords.dp if shards > 1 else 0
        numbered, at = [], 0
        for chunk in chunks:
            numbered.append([(at + i, record, p.numel()) for i, (record, p) in enumerate(chunk)])
            at += len(chunk)
        plans = plan_buckets(numbered, shards=shards, capacity=capacity)
        self.buckets = [Bucket(plan, self.parameters, wide, shard, shards) for plan in plans]
        self._bucket_of = {slot.index: b for b, plan in enumerate(plans) for slot in plan.slots}
        self._index = {id(p): i for i, (_, p) in enumerate(self.parameters)}
        self.pieces = [
            Piece(
                self.parameters[f.index][0], f.start, bucket.weights[f.at : f.at + f.numel],
                bucket.masters[f.at - bucket.own.start : f.at - bucket.own.start + f.numel],
                bucket.gradients[f.at : f.at + f.numel],
            )
            for bucket in self.buckets for f in fragments(bucket.plan, shard=shard, shards=shards)
        ]
        self._uses: list[int] | None = None
        self._seen = [0] * len(self.parameters)
        self._expected = [0] * len(self.parameters)
        self._missing = [0] * len(self.buckets)
        self._next = len(self.buckets)
        self._early = False
        self._micro_batches = 0

    # -- gradients ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(self, micro_batches: int, *, early: bool) -> None:
        """Clear the gradients of a step. ``early``: reduce buckets as they fill up, not only at the end."""
        for bucket in self.buckets:
            bucket.gradients.zero_()
        self._micro_batches, self._next = micro_batches, 0
        self._seen = [0] * len(self.parameters)
        self._early = early and self._uses is not None and self.ctx.dp_group is not None
        if self._uses is not None:
            self._expected = [n * micro_batches for n in self._uses]
            self._missing = [sum(self._expected[s.index] > 0 for s in b.plan.slots) for b in self.buckets]

    def added(self, parameter: torch.Tensor) -> None:
        """A gradient has been added to a parameter's ``main_grad``."""
        index = self._index[id(parameter)]
        self._seen[index] += 1
        if not self._early:
            return
        number = self._bucket_of[index]
        if self._seen[index] == self._expected[index]:
            self._missing[number] -= 1
            while self._next < len(self.buckets) and self._missing[self._next] == 0:
                self._start(self.buckets[self._next])
                self._next += 1
        elif self._seen[index] > self._expected[index]:
            raise RuntimeError(
                f"{self.parameters[index][0].name}: gradient {self._seen[index]} of this step, and the first step had "
                f"{self._expected[index]}: its bucket may have been reduced already"
            )

    def _start(self, bucket: Bucket) -> None:
        group = self.ctx.dp_group
        if group is None:
            return
        flat = bucket.gradients
        if self.reduce_dtype != flat.dtype:
            bucket.narrow = flat = flat.to(self.reduce_dtype)
        if bucket.shards == 1:
            bucket.reducing = dist.all_reduce(flat, group=group, async_op=True)
        else:
            bucket.reducing = reduce_scatter_single(flat[bucket.own], flat, group=group, async_op=True)

    @torch.no_grad()
    def finish(self) -> None:
        """Start what has not been started, wait for all, and sum partial and tied gradients: shards only."""
        if self._uses is None:
            self._uses = [n // self._micro_batches for n in self._seen]
        while self._next < len(self.buckets):
            self._start(self.buckets[self._next])
            self._next += 1
        for bucket in self.buckets:
            if bucket.reducing is not None:
                bucket.reducing.wait()
                bucket.reducing = None
            own = bucket.gradients[bucket.own]
            if bucket.narrow is not None:
                own.copy_(bucket.narrow[bucket.own])
                bucket.narrow = None
            group = {"partial": self.ctx.tp_group, "tied": self.ctx.embedding_group}.get(bucket.plan.kind)
            if group is not None:
                dist.all_reduce(own, group=group)

    @torch.no_grad()
    def whole_gradients(self) -> list[tuple[ParameterRecord, torch.Tensor]]:
        """The summed gradient of each parameter on every rank (for comparisons: moves and copies all). Collective."""
        out: dict[int, torch.Tensor] = {}
        for bucket in self.buckets:
            flat = bucket.gradients
            if bucket.shards > 1:
                flat = torch.empty_like(bucket.gradients)
                all_gather_single(flat, bucket.gradients[bucket.own].clone(), group=self.ctx.dp_group)
            for slot in bucket.plan.slots:
                shape = self.parameters[slot.index][1].shape
                out[slot.index] = flat[slot.start : slot.start + slot.numel].view(shape)
        return [(record, out[i]) for i, (record, _) in enumerate(self.parameters)]

    def local_gradients(self) -> list[tuple[ParameterRecord, torch.Tensor]]:
        """What this rank has added up itself, whole; only before ``finish``."""
        return [(record, p.main_grad) for record, p in self.parameters]  # type: ignore[attr-defined]

    # -- weights -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into this rank's weights (where the update has not done so)."""
        for bucket in self.buckets:
            if bucket.masters.dtype != bucket.weights.dtype:
                bucket.weights[bucket.own].copy_(bucket.masters)

    @torch.no_grad()
    def start_gather(self) -> None:
        """Start gathering the updated weights, those that the next forward pass needs first."""
        for bucket in reversed(self.buckets):
            if bucket.shards > 1:
                own = bucket.weights[bucket.own]
                bucket.gathering = all_gather_single(
                    bucket.weights, own, group=self.ctx.dp_group, async_op=True
                )

    def wait(self, buckets: Sequence[Bucket] | None = None) -> None:
        """Until the weights of these buckets (default: all) are there."""
        for bucket in self.buckets if buckets is None else buckets:
            if bucket.gathering is not None:
                bucket.gathering.wait()
                bucket.gathering = None

    def wait_before(self, unit: nn.Module) -> None:
        """Make every forward pass of a module wait for its weights, and for nothing else."""
        numbers = sorted({self._bucket_of[self._index[id(p)]] for p in unit.parameters()})
        mine = [self.buckets[n] for n in numbers]
        if mine:
            unit.register_forward_pre_hook(lambda module, inputs: self.wait(mine))
