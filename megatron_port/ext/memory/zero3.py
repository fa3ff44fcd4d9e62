"""Weights that are whole only while a unit of the model uses them (ZeRO stage 3, Rajbhandari et al., arXiv 1910.02054;
FSDP, Zhao et al., arXiv 2304.11277).

Each rank keeps its shard of every bucket. A unit (embedding, layer, head) is gathered into a *window* before it runs
forward and before it runs backward, one unit ahead of the computation. A unit's window and its place there never
change, so what autograd has saved of a weight stays a view of the memory that the weight is gathered into again.

With ``reshard = "forward"`` layers take turns in two windows, embedding and head share a third, and a table that is
tied or used by several units has its own: whole weights take two layers and the tables, however many layers there are.
A window keeps its unit until another needs it, so where a pass turns round nothing is gathered again. With ``"step"``
each unit has its own window, which is freed after the step's passes.

The gathers are asynchronous and touch only windows that the unit which is about to run does not use. On a GPU the
communicator's stream waits for what has been queued before, hence for the last kernel that reads the window's former
unit, and :meth:`UnitGather.enter` makes the compute stream wait for the gather. Shards that live in host memory
(``on_host``) are first copied to their place in the window, on a stream for copies, which the communicator waits for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from megatron_port.core.dist.collectives import all_gather_single
from megatron_port.core.dist.device_streams import COMPUTE, access, in_flight, is_observed
from megatron_port.core.optim.buckets import BucketPlan
from megatron_port.ext.memory.streams import COPY_IN, Streams


@dataclass(frozen=True)
class WeightSharding:
    """How weights are sharded."""

    ends: Collection[int] = ()
    """Units, by index, that are the model's embedding or head."""
    keep: bool = False
    """Each unit has its own window, for as long as a step lasts (``reshard = "step"``)."""
    on_host: bool = False
    """The shards live in host memory and are copied to the device for each gather (``offload.weights = "cpu"``)."""


class ShardedBucket(Protocol):
    """Parts of a bucket that are gathered (``optim.sharded.Bucket``)."""

    weights: torch.Tensor
    """All of it, in a window."""
    shard: torch.Tensor
    """This rank's part, in memory of its own."""
    shard_slice: slice
    """The part's place in ``weights``."""
    gather_group: dist.ProcessGroup | None
    """Ranks that hold the parts; None: this one alone."""


@contextmanager
def without_memory() -> Iterator[None]:
    """Free the memory of every parameter as soon as a module has it, while a model is built whose weights would not
    fit whole. The engine gives them memory; their values are undefined until they are loaded."""

    def free(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        parameter.untyped_storage().resize_(0)

    handle = register_module_parameter_registration_hook(free)
    try:
        yield
    finally:
        handle.remove()


class Window:
    """Memory for the whole weights of one gather group at a time."""

    def __init__(self) -> None:
        self.flat = torch.empty(0)
        self.nbytes = 0
        self.holder: GatherGroup | None = None
        """Whose weights are here, or on their way."""

    def allocate(self, numel: int, like: torch.Tensor) -> None:
        """Allocate for the largest of the groups that share the window."""
        self.flat = torch.zeros(numel, dtype=like.dtype, device=like.device)
        self.nbytes = self.flat.nbytes


class Gathering(Protocol):
    """A gather under way: a collective, or a copy."""

    def wait(self) -> object:
        """Make compute wait for its end."""


class _Copy:
    """The copy of a shard to the device that nothing is gathered with."""

    def __init__(self, streams: Streams) -> None:
        self._streams, self._ended = streams, streams.event()
        streams.record(self._ended, COPY_IN)

    def wait(self) -> None:
        self._streams.wait(COMPUTE, self._ended)


@dataclass(eq=False)
class GatherGroup:
    """Buckets that are gathered together: those of one unit, or of one table."""

    window: Window
    plans: list[int] = field(default_factory=list)
    """Indices of the buckets, in the order of the plans."""
    buckets: list[ShardedBucket] = field(default_factory=list)
    gathering: list[Gathering] = field(default_factory=list)
    """Gathers that nobody has waited for yet."""

    def wait(self) -> None:
        """Wait until the weights are here (on a GPU: make the stream wait)."""
        for work in self.gathering:
            work.wait()
        self.gathering.clear()


class UnitGather:
    """The windows of a rank, and which units are in them.

    Args:
        plans: all buckets of the rank.
        like: a parameter, whose dtype and device the windows have.
        streams: of the device, for copies of shards on the host.
    """

    def __init__(
        self, plans: Sequence[BucketPlan], sharding: WeightSharding, *, like: torch.Tensor,
        streams: Streams | None = None,
    ) -> None:
        self.streams = Streams() if streams is None else streams
        self.on_host = sharding.on_host
        self._computed = self.streams.event()
        self.copied = 0
        """Bytes of shards copied to the device since the start."""
        self.keep = sharding.keep
        self.groups = _groups(plans, sharding)
        self.windows = list(dict.fromkeys(g.window for g in self.groups))
        self._of_plan = {i: g for g in self.groups for i in g.plans}
        for window in self.windows:
            sharing = [g for g in self.groups if g.window is window]
            window.allocate(max(sum(plans[i].numel for i in g.plans) for g in sharing), like)
        self._needs: dict[int, list[GatherGroup]] = {}
        """By the identity of a unit."""
        self._uses: list[int] = []
        """Units in the order of the step's passes; ``_at``: index of the one that runs."""
        self._at = -1

    def memory(self, plans: Sequence[BucketPlan]) -> list[torch.Tensor | None]:
        """Return where the weights of each bucket lie when they are whole; None: they always are, nobody has a part."""
        out: dict[int, torch.Tensor] = {}
        for group in self.groups:
            sizes = [plans[i].numel for i in group.plans]
            out |= zip(group.plans, group.window.flat[: sum(sizes)].split(sizes))
        return [out.get(i) for i in range(len(plans))]

    def attach(self, buckets: Sequence[ShardedBucket]) -> None:
        """Take the buckets of the plans; nothing is gathered from here on until a unit needs it."""
        for group in self.groups:
            group.buckets = [buckets[i] for i in group.plans]
        self.release()

    # -- units -------------------------------------------------------------------------------------------------------

    def register(self, unit: nn.Module, numbers: Iterable[int]) -> None:
        """Gather the buckets ``numbers`` before every forward and backward pass of ``unit``.

        A unit with ``backward_reads_weights = False`` is not gathered for its backward pass.
        """
        self._needs[id(unit)] = list(dict.fromkeys(self._of_plan[n] for n in numbers if n in self._of_plan))
        backward = getattr(unit, "backward_reads_weights", True)
        key = id(unit)

        def before(module: nn.Module, inputs: object) -> None:
            self.enter(key)

        def after(module: nn.Module, inputs: object, output: object) -> None:
            tensors = output if isinstance(output, (tuple, list)) else (output,)
            found = [t for t in tensors if isinstance(t, torch.Tensor) and t.requires_grad]
            entered: list[bool] = []

            def begin(gradient: torch.Tensor) -> None:
                if not entered:  # once, whichever output's gradient comes first
                    entered.append(True)
                    self.enter(key)

            for tensor in found:
                tensor.register_hook(begin)

        unit.register_forward_pre_hook(before)
        if backward:
            unit.register_forward_hook(after)

    def plan(self, units: Iterable[nn.Module]) -> None:
        """State the order in which a step's passes will use units, and start the first gather.

        All ranks of the shard group state the same order.
        """
        self._uses, self._at = [id(unit) for unit in units if id(unit) in self._needs], -1
        if self._uses:  # the first gather runs while the step begins
            self._start(self._needs[self._uses[0]])

    @torch.no_grad()
    def enter(self, unit: int) -> None:
        """Make the weights of a unit whole, and start to gather those of the next.

        Raises:
            RuntimeError: the plan has another unit here, so that ranks might gather in different orders.
        """
        if self._at + 1 < len(self._uses):
            self._at += 1
            if self._uses[self._at] != unit:
                raise RuntimeError(f"use {self._at} of the step's {len(self._uses)} is of another unit than planned")
        needed = self._needs[unit]
        self._start(needed)
        for group in needed:
            group.wait()
        if is_observed():
            access(COMPUTE, "a unit's pass", reads=[b.weights for group in needed for b in group.buckets])
        at = self._at + 1
        while at < len(self._uses) and self._uses[at] == unit:
            at += 1
        if at < len(self._uses):
            taken = {group.window for group in needed}
            self._start([g for g in self._needs[self._uses[at]] if g.window not in taken])

    def make_whole(self, number: int) -> None:
        """Gather bucket ``number``, outside of the passes: its weights are valid until another unit's are gathered.
        Collective over the shard group."""
        group = self._of_plan.get(number)
        if group is not None:
            self._start([group])
            group.wait()

    def release(self) -> None:
        """Forget what the windows hold, because the shards have changed or the passes have ended."""
        for window in self.windows:
            if window.holder is not None:
                window.holder.wait()
            window.holder = None
            if self.keep:
                window.flat.untyped_storage().resize_(0)
        self._uses, self._at = [], -1

    def _start(self, groups: Iterable[GatherGroup]) -> None:
        """Start gathering what is not in its window."""
        for group in groups:
            window = group.window
            if window.holder is group:
                continue
            if window.holder is not None:
                window.holder.wait()
            window.holder = group
            if self.keep:
                window.flat.untyped_storage().resize_(window.nbytes)
            for bucket in group.buckets:
                group.gathering.append(self._gather_host(bucket) if self.on_host else self._gather(bucket))

    def _gather(self, bucket: ShardedBucket) -> Gathering:
        work = all_gather_single(bucket.weights, bucket.shard, group=bucket.gather_group, async_op=True)
        return in_flight(work, "weight gather", reads=[bucket.shard], writes=[bucket.weights])

    def _gather_host(self, bucket: ShardedBucket) -> Gathering:
        """Copy this rank's part from the host into the window, once compute is done with that, and gather the rest.

        The host updates a shard after its gradient has come, which is after compute has used what is gathered here.
        """
        own = bucket.weights[bucket.shard_slice]
        self.streams.record(self._computed, COMPUTE)
        self.streams.wait(COPY_IN, self._computed)
        access(COPY_IN, "weights to the device", reads=[bucket.shard], writes=[own])
        self.copied += own.nbytes
        work = None
        with self.streams.on(COPY_IN):  # which is then the stream that the communicator waits for
            own.copy_(bucket.shard, non_blocking=True)
            if bucket.gather_group is not None:
                work = all_gather_single(bucket.weights, own, group=bucket.gather_group, async_op=True)
        if work is None:
            return _Copy(self.streams)
        return in_flight(work, "weight gather", reads=[own], writes=[bucket.weights], after=COPY_IN)


def _groups(plans: Sequence[BucketPlan], sharding: WeightSharding) -> list[GatherGroup]:
    """Return the buckets grouped by unit, with the windows that they share; one with a dedicated buffer
    is a group of its own. One that is not sharded is in none, unless it lives on the host."""
    shared = Window(), Window(), Window()
    units: dict[int, GatherGroup] = {}
    out: list[GatherGroup] = []
    layers = sorted({plan.unit for plan in plans} - set(sharding.ends))
    for number, plan in enumerate(plans):
        if plan.shards == 1 and not sharding.on_host:
            continue
        if plan.dedicated_buffer:
            out.append(GatherGroup(Window(), [number]))
            continue
        if plan.unit not in units:
            turn = 2 if plan.unit in sharding.ends else layers.index(plan.unit) % 2
            units[plan.unit] = GatherGroup(Window() if sharding.keep else shared[turn])
            out.append(units[plan.unit])
        units[plan.unit].plans.append(number)
    return out
