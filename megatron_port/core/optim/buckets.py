"""Layout of a rank's parameters in flat buckets and the shard of each that a replica owns; the memory of a bucket.

A bucket is what one collective moves: parameters of one *unit* (embedding, layer, head), so that the weights of a unit
can be gathered, and its gradients reduced, without those of another. Each tied parameter, and each that several units
use, has a bucket of its own. Buckets follow the order in which backward passes end: last unit first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import nn

from megatron_port.core.dist.collectives import all_gather_single
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Mesh, MeshDims
from megatron_port.core.dist.record import ParameterRecord
from megatron_port.core.optim.rules import ALIGN, OptimizerRule, StateKind


@dataclass(frozen=True)
class BucketEntry:
    """Position of a parameter in a bucket."""

    index: int
    """Index of the parameter in the engine's list."""
    start: int
    numel: int


@dataclass(frozen=True)
class PartialRange:
    """Elements [start, stop) of a bucket whose gradients are still to be summed along ``dims``: tp under sequence
    parallelism, the copies of key/value heads."""

    start: int
    stop: int
    dims: MeshDims


@dataclass(frozen=True)
class BucketPlan:
    """One bucket: ``numel`` elements, padding included, a multiple of the alignment times the number of shards."""

    slots: tuple[BucketEntry, ...]
    numel: int
    unit: int = 0
    """Index of the unit whose parameters it holds; of a shared parameter, the first that uses it."""
    reduce_dims: MeshDims = frozenset()
    """Mesh dimensions of the reduce-scatter of its gradients, or of the all-reduce where it is not sharded."""
    shards: int = 1
    """Number of shards: ranks along ``reduce_dims``; 1 where each of them has all of it."""
    copies: MeshDims = frozenset()
    """Mesh dimensions along which each shard has copies, over which its gradients are all-reduced afterwards."""
    partial: tuple[PartialRange, ...] = ()
    """Ranges whose gradients are all-reduced along the model's axes as well."""
    tied: str | None = None
    """Key of the stages that hold a copy, over which it is also all-reduced (``ParallelContext.tied_group``)."""
    dedicated_buffer: bool = False
    """ZeRO stage 2 keeps a gradient buffer for this bucket alone, in place of one of the pool: gradients arrive all
    through a backward pass (several units use the parameter), or it is a table, much larger than a layer's buckets."""
    frozen: bool = False
    """Nothing in it is trained: it has weights alone."""


BucketParameter = tuple[int, ParameterRecord, int]
"""A parameter: its index, its record, the elements of its local tensor."""


def plan_buckets(
    units: Sequence[Sequence[BucketParameter]], mesh: Mesh, *, reduce_dims: MeshDims, split: bool, capacity: int,
    shared: Collection[int] = (), align: int = ALIGN,
) -> list[BucketPlan]:
    """Return buckets of at most ``capacity`` elements; a larger parameter has its own.

    Args:
        units: the parameters of each unit, in forward order, each parameter once.
        reduce_dims: mesh dimensions of the reduce-scatter, of which a parameter takes those along which it has copies:
            experts that ranks divide have fewer, and buckets of their own.
        split: shard the buckets along them (ZeRO); else every replica keeps all.
        shared: indices of parameters that several units use.
        align: every parameter starts, and every part of a bucket ends, at a multiple.
    """
    plans: list[BucketPlan] = []
    for number in reversed(range(len(units))):
        together: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[list[int], BucketParameter]]] = {}
        alone: list[tuple[list[int], BucketParameter]] = []
        for entry in reversed(units[number]):
            index, record, _ = entry
            summed = record.reduces_over(mesh)
            mine, beyond = summed & reduce_dims, summed - reduce_dims
            copies = beyond & mesh.dims("dp_replicate")
            if record.tied_key is not None or index in shared:
                alone.append((sorted(beyond), entry))
            else:
                key = tuple(sorted(copies)), tuple(sorted(mine))
                together.setdefault(key, []).append((sorted(beyond), entry))
        # Partial gradients lie together, at the end of a bucket, in one range for each set of mesh dimensions.
        groups = [sorted(entries, key=lambda pair: pair[0]) for _, entries in sorted(together.items())]
        for entries in (*groups, *([one] for one in alone)):
            dims = {entry[0]: frozenset(beyond) for beyond, entry in entries}
            for slots, end in _filled([entry for _, entry in entries], capacity, align):
                _, record, _ = entries[0][1]
                summed = record.reduces_over(mesh) & reduce_dims
                shards = mesh.size(summed) if split else 1
                copies, partial = _further_sums(slots, dims, mesh)
                plans.append(BucketPlan(
                    slots, -(-end // (align * shards)) * align * shards, number, summed, shards, copies=copies,
                    partial=partial, tied=record.tied_key,
                    dedicated_buffer=record.tied_key is not None or slots[0].index in shared,
                ))
    return plans


def _further_sums(
    slots: Sequence[BucketEntry], beyond: Mapping[int, MeshDims], mesh: Mesh
) -> tuple[MeshDims, tuple[PartialRange, ...]]:
    """Return over what a bucket's gradients are all-reduced after the reduce-scatter: the mesh dimensions of the
    shards' copies, and ranges along the model's axes. ``beyond``: the dimensions left, by parameter."""
    replicas = mesh.dims("dp_replicate")
    ranges: list[PartialRange] = []
    for slot in slots:
        dims, start = beyond[slot.index] - replicas, slot.start
        if ranges and ranges[-1].dims == dims:
            start = ranges.pop().start
        if dims:
            ranges.append(PartialRange(start, slot.start + slot.numel, dims))
    return beyond[slots[0].index] & replicas, tuple(ranges)


def _filled(
    parameters: Sequence[BucketParameter], capacity: int, align: int
) -> Iterator[tuple[tuple[BucketEntry, ...], int]]:
    """Yield the entries of each bucket, and the elements that they take."""
    slots: list[BucketEntry] = []
    end = 0
    for index, _, numel in parameters:
        if slots and end + numel > capacity:
            yield tuple(slots), end
            slots, end = [], 0
        slots.append(BucketEntry(index, end, numel))
        end += -(-numel // align) * align
    if slots:
        yield tuple(slots), end


@dataclass(frozen=True)
class ShardRange:
    """Range of a parameter that a shard holds: elements [start, start + numel) of its flattened local tensor, which lie
    from ``at`` on in the bucket."""

    index: int
    start: int
    numel: int
    at: int


def shard_ranges(plan: BucketPlan, *, shard: int) -> list[ShardRange]:
    """Return the parameters' ranges in shard ``shard`` of a bucket, in order."""
    size = plan.numel // plan.shards
    first, last = shard * size, (shard + 1) * size
    out = []
    for slot in plan.slots:
        low, high = max(slot.start, first), min(slot.start + slot.numel, last)
        if low < high:
            out.append(ShardRange(slot.index, low - slot.start, high - low, low))
    return out


# Memory for gradients that live only until they are reduced (ZeRO stage 2).

USUAL = 2
"""Buffers of the pool: one bucket fills up while the one before it is being reduced."""


class GradBufferPool:
    """Flat buffers of ``size`` elements, lent to buckets while they fill up and are reduced."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.size, self.dtype, self.device = size, dtype, device
        self._free: list[torch.Tensor] = []
        self.made = 0
        """Buffers that exist."""

    def acquire(self, numel: int, free: Callable[[], bool]) -> torch.Tensor:
        """Return an uninitialized buffer of ``numel`` elements. With ``USUAL`` buffers lent out, ``free()`` is called
        until one has been released; if it returns false, one more is allocated."""
        while not self._free and self.made >= USUAL and free():
            pass
        if not self._free:
            self._free.append(torch.empty(self.size, dtype=self.dtype, device=self.device))
            self.made += 1
        return self._free.pop()[:numel]

    def release(self, buffer: torch.Tensor) -> None:
        """Return a buffer of :meth:`acquire` to the pool."""
        self._free.append(buffer.as_strided((self.size,), (1,), 0))

    def trim(self) -> None:
        """Free the buffers beyond ``USUAL`` that are not lent out."""
        while self._free and self.made > USUAL:
            self._free.pop()
            self.made -= 1


# Counting of the gradients added to each bucket: a bucket that has all of them can be reduced.

class GradReadyTracker:
    """Finds the buckets whose gradients are complete; a round is one step, or under ZeRO stage 2 one backward pass.

    Each use of a parameter adds to its gradient once. The first round counts the uses in one pass, so no bucket is
    complete before the round ends. From then on a bucket is complete when each of its parameters has received that
    count times the number of passes in the round. Buckets are reported in their given order only: replicas then start
    their collectives in one order, whatever the order in which gradients arrive.

    Args:
        buckets: (number, its parameters' indices), in the order in which they are reported.
        name: of a parameter, for messages.
    """

    def __init__(self, buckets: Sequence[tuple[int, Sequence[int]]], name: Callable[[int], str] = str) -> None:
        self.numbers = [number for number, _ in buckets]
        self._indices = [list(indices) for _, indices in buckets]
        self._place = {index: i for i, indices in enumerate(self._indices) for index in indices}
        self._name = name
        self._uses: dict[int, int] | None = None
        self._passes = 1
        self._early = False
        self._next = len(buckets)
        self._seen: dict[int, int] = dict.fromkeys(self._place, 0)
        self._missing: list[int] = []

    def begin(self, passes: int, *, early: bool) -> None:
        """Begin a round of ``passes`` passes. ``early``: report buckets before its end."""
        self._passes, self._next = passes, 0
        self._seen = dict.fromkeys(self._place, 0)
        self._early = early and self._uses is not None
        if self._uses is not None:
            self._missing = [sum(self._uses[i] > 0 for i in indices) for indices in self._indices]

    def added(self, index: int) -> list[int]:
        """Count a gradient added to a parameter; return the numbers of the buckets that are complete now.

        Raises:
            RuntimeError: the gradient comes after its bucket was reported and may have been reduced; it would be lost.
        """
        self._seen[index] += 1
        if not self._early:
            return []
        assert self._uses is not None
        seen, wanted = self._seen[index], self._uses[index] * self._passes
        if seen > wanted:
            raise RuntimeError(
                f"{self._name(index)}: gradient {seen} of this step, and the first step had {wanted}: its bucket may "
                "have been reduced already"
            )
        if seen < wanted:
            return []
        self._missing[self._place[index]] -= 1
        full = self._next
        while full < len(self.numbers) and self._missing[full] == 0:
            full += 1
        out, self._next = self.numbers[self._next : full], full
        return out

    def rest(self) -> list[int]:
        """End the round; return the numbers of the buckets that it has not reported."""
        if self._uses is None:
            self._uses = {index: n // self._passes for index, n in self._seen.items()}
        out, self._next = self.numbers[self._next :], len(self.numbers)
        return out


# The memory of one bucket: weights, gradients, masters and optimizer state, each a flat tensor, and views of them.

RecordedParameter = tuple[ParameterRecord, nn.Parameter]
UNCLEARED = 1 << 8
"""Matrices of at least this many elements: a step does not clear their gradients, it writes the first one over them."""


# Where the optimizer's state of a bucket lies: one flat tensor for each kind, and the range of each parameter in it.
#
# State of elements and blocks follows the bucket: where all parameters have a kind, it lies as the masters do. Where
# only some have it, theirs alone takes memory. State of rows and columns is small, and every rank of a bucket holds it
# for all of the bucket's parameters.

@dataclass(frozen=True)
class StateRange:
    """Elements [start, start + numel) of the flattened state of parameter ``index``, from ``at`` on in the flat tensor.

    ``start`` counts in this rank's tensor of the state (``StateKind.place``).
    """

    index: int
    start: int
    numel: int
    at: int

    @property
    def span(self) -> slice:
        """Place in the flat tensor."""
        return slice(self.at, self.at + self.numel)


@dataclass(frozen=True)
class StateLayout:
    """Layout of one kind of state in a flat tensor of ``numel`` elements: its ranges, in the order of the bucket."""

    kind: StateKind
    numel: int
    ranges: tuple[StateRange, ...]


def state_layouts(
    plan: BucketPlan, shard: int, records: Sequence[ParameterRecord], rule: OptimizerRule
) -> list[StateLayout]:
    """Return the layouts of all kinds that parameters of a bucket have, on the rank that holds ``shard`` of it.

    Raises:
        ConfigError: a rank's slice of a parameter would cut a block (``StateKind.place``).
    """
    kinds = {slot.index: rule.state(records[slot.index]) for slot in plan.slots}
    owned = shard_ranges(plan, shard=shard)
    out = []
    for kind in dict.fromkeys(kind for each in kinds.values() for kind in each):
        for slot in plan.slots:
            if kind in kinds[slot.index]:
                kind.place(records[slot.index])  # raises for a block that would be cut, alike on every shard
        if kind.divided:
            having = [f for f in owned if kind in kinds[f.index]]
            everywhere = all(kind in each for each in kinds.values())
            out.append(_aligned(plan, shard, kind, having) if everywhere else _packed(kind, having))
        else:
            having_all = [slot.index for slot in plan.slots if kind in kinds[slot.index]]
            out.append(_whole(kind, having_all, records))
    return out


def _aligned(plan: BucketPlan, shard: int, kind: StateKind, owned: Sequence[ShardRange]) -> StateLayout:
    """Return the layout of state that lies as the masters do, padding included."""
    size, b = plan.numel // plan.shards, kind.block
    ranges = [StateRange(f.index, f.start // b, -(-f.numel // b), (f.at - shard * size) // b) for f in owned]
    return StateLayout(kind, size // b, tuple(ranges))


def _packed(kind: StateKind, owned: Sequence[ShardRange]) -> StateLayout:
    ranges, end = [], 0
    for f in owned:
        numel = -(-f.numel // kind.block)
        ranges.append(StateRange(f.index, f.start // kind.block, numel, end))
        end += -(-numel // ALIGN) * ALIGN
    return StateLayout(kind, end, tuple(ranges))


def _whole(kind: StateKind, indices: Sequence[int], records: Sequence[ParameterRecord]) -> StateLayout:
    ranges, end = [], 0
    for index in indices:
        numel = prod(kind.place(records[index]).local_shape)
        ranges.append(StateRange(index, 0, numel, end))
        end += -(-numel // ALIGN) * ALIGN
    return StateLayout(kind, end, tuple(ranges))


@dataclass(frozen=True)
class StateShard:
    """Range of one parameter that this rank owns and updates; its tensors are 1-D views of equal length."""

    record: ParameterRecord
    start: int
    """First element of the flattened local tensor."""
    weight: torch.Tensor
    """In the model's dtype."""
    master: torch.Tensor
    """fp32 or wider; the same memory as ``weight`` where that has this dtype."""
    gradient: torch.Tensor
    """fp32 or wider: the sum over micro-batches and replicas after ``ShardedParameters.finish``; empty where frozen."""
    state: Mapping[str, torch.Tensor]
    """The optimizer rule's tensors of this range, by kind: one value per element, or per block."""


@dataclass(frozen=True)
class ReducedState:
    """State of a parameter's rows or columns (Adafactor), which ZeRO does not shard."""

    record: ParameterRecord
    """Record of the parameter."""
    kind: StateKind
    tensor: torch.Tensor
    """In the shape of this rank's slice (``kind.place(record).local_shape``): padding is left out."""


def clear(views: list[torch.Tensor]) -> None:
    """Zero tensors of one device, in few launches."""
    if views:
        torch._foreach_zero_(views)


class BucketMemory:
    """Allocation of a bucket's weights, masters and state; this one has all on the device, the shard of the weights a
    view of all weights. ``ext.memory.held`` has others."""

    def weights(self, plan: BucketPlan, like: torch.Tensor) -> torch.Tensor:
        """Return memory for all weights, of the dtype and device of ``like``."""
        return torch.zeros(plan.numel, dtype=like.dtype, device=like.device)

    def part(self, plan: BucketPlan, weights: torch.Tensor, shard_slice: slice) -> torch.Tensor:
        """Return the persistent memory of this rank's shard; ``weights`` have their values already."""
        return weights[shard_slice]

    def state(
        self, part: torch.Tensor, layouts: Sequence[StateLayout], master_dtype: torch.dtype
    ) -> tuple[torch.Tensor, dict[StateKind, torch.Tensor]]:
        """Return the masters of this rank's shard (the weights themselves where those have ``master_dtype``) and the
        rule's flat tensors: zeros."""
        masters = part if part.dtype == master_dtype else torch.zeros_like(part, dtype=master_dtype)
        # The rule's state lies flat too, so that all of it can be hashed with a few kernels a bucket.
        return masters, {
            layout.kind: torch.zeros(layout.numel, dtype=layout.kind.dtype or master_dtype, device=masters.device)
            for layout in layouts
        }


class Bucket:
    """Memory of one bucket and the collectives in flight on it.

    ``weights``: all of them; ``shard``: this rank's. The shard is a view of the weights, unless ``memory`` gathers them
    only while they are used (ZeRO stage 3).

    ``gradients``: of all its parameters; ``sums``: this rank's shard of them, reduced. With ``persistent`` the sums are
    a view of the gradients; else (ZeRO stage 2) gradients exist only while a buffer holds them: ``grad_buffer``, where
    the plan asks for a dedicated one, or one of the pool's.

    ``uninitialized``: parameters whose gradients hold neither a sum nor zeros yet, by index.
    """

    def __init__(
        self, plan: BucketPlan, parameters: Sequence[RecordedParameter], master_dtype: torch.dtype,
        ctx: ParallelContext, *, persistent: bool, state: Sequence[StateLayout], memory: BucketMemory,
    ) -> None:
        first = parameters[plan.slots[0].index][1]
        self.plan, self.shards, self.persistent = plan, plan.shards, persistent
        self.group = ctx.along(plan.reduce_dims)
        """Ranks that gradients are reduced over, and a sharded bucket is sharded over; None: this rank alone."""
        self.gather_group = self.group if plan.shards > 1 else None
        """Ranks that hold the shards; None: this rank holds all of it."""
        self.index = ctx.mesh.index(ctx.rank, plan.reduce_dims) if plan.shards > 1 else 0
        """Number of this rank's shard."""
        self.weights = memory.weights(plan, first)
        size = plan.numel // plan.shards
        self.shard_slice = slice(self.index * size, (self.index + 1) * size)
        self.gradients: torch.Tensor | None = None
        if plan.frozen:
            self.sums = torch.empty(0, dtype=master_dtype, device=first.device)
        elif persistent:
            self.gradients = torch.zeros(plan.numel, dtype=master_dtype, device=first.device)
            self.sums = self.gradients[self.shard_slice]
        else:
            self.sums = torch.zeros(size, dtype=master_dtype, device=first.device)
        self.grad_buffer: torch.Tensor | None = None
        if not persistent and plan.dedicated_buffer and not plan.frozen:
            self.grad_buffer = torch.empty(plan.numel, dtype=master_dtype, device=first.device)
        for slot in plan.slots:
            p = parameters[slot.index][1]
            span = slice(slot.start, slot.start + slot.numel)
            if p.untyped_storage().nbytes():  # else it was built without memory
                self.weights[span].copy_(p.detach().reshape(-1))
            p.data = self.weights[span].view(p.shape)
        self.shard = self.masters = memory.part(plan, self.weights, self.shard_slice)
        self.layouts = {layout.kind: layout for layout in state}
        self.state: dict[StateKind, torch.Tensor] = {}
        """The rule's flat tensors, each as its layout says."""
        if not plan.frozen:
            self.masters, self.state = memory.state(self.shard, state, master_dtype)
        self.reducing: dist.Work | None = None
        self.reduce_buffer: torch.Tensor | None = None
        self.gathering: dist.Work | None = None
        self.summed = False
        """Whether something has been added to ``sums`` in this step, where these are no view of the gradients."""
        self.uninitialized: dict[int, BucketEntry] = {}
        self._large = [s for s in plan.slots if s.numel >= UNCLEARED and parameters[s.index][1].dim() > 1]

    def begin(self) -> list[torch.Tensor]:
        """Begin a step; return the views to clear, as :meth:`forget` does."""
        self.summed = False
        return [] if self.gradients is None else self.forget()

    def forget(self) -> list[torch.Tensor]:
        """Discard the values of ``gradients``. Return the views of them that the caller has to clear: all but the large
        ones, which become ``uninitialized``."""
        assert self.gradients is not None
        self.uninitialized = {slot.index: slot for slot in self._large}
        ends = [0, *(at for slot in self._large for at in (slot.start, slot.start + slot.numel)), self.plan.numel]
        return [self.gradients[a:b] for a, b in zip(ends[::2], ends[1::2]) if a < b]

    def close(self) -> None:
        """Clear what is still uninitialized, before the bucket is reduced."""
        for slot in self.uninitialized.values():
            assert self.gradients is not None
            self.gradients[slot.start : slot.start + slot.numel].zero_()
        self.uninitialized = {}

    def add_reduced(self, reduced: torch.Tensor) -> None:
        """Add this rank's shard of reduced gradients to sums that are no view of them; a step's first is copied."""
        if self.summed:
            self.sums.add_(reduced)
        else:
            self.sums.copy_(reduced)
        self.summed = True

    def end(self) -> None:
        """End a step: clear sums, where they are no view of the gradients, that nothing was added to."""
        if not self.summed:
            self.sums.zero_()


@torch.no_grad()
def whole_gradients(
    buckets: Sequence[Bucket], parameters: Sequence[RecordedParameter]
) -> list[tuple[ParameterRecord, torch.Tensor]]:
    """Return the full gradients of buckets whose sums are final, gathered from the shards. Collective."""
    out: dict[int, torch.Tensor] = {}
    for bucket in buckets:
        flat = bucket.sums
        if bucket.shards > 1:
            flat = torch.empty(bucket.plan.numel, dtype=flat.dtype, device=flat.device)
            all_gather_single(flat, bucket.sums.clone(), group=bucket.group)
        for slot in bucket.plan.slots:
            shape = parameters[slot.index][1].shape
            out[slot.index] = flat[slot.start : slot.start + slot.numel].view(shape)
    return [(record, out[i]) for i, (record, _) in enumerate(parameters) if i in out]
