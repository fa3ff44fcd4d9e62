"""Collectives of tensor and sequence parallelism, with their gradients.

Names follow Megatron-LM (Shoeybi et al., arXiv 1909.08053; Korthikanti et al.,
arXiv 2205.05198). A group of None means one rank: the function is the identity.
Sequence-parallel tensors are split along dimension 0, [seq/tp, batch, hidden].
These leave a tensor-parallel region; its entry is part of ``linear.linear``, which hides
the collective of the backward pass.

| function | forward | backward |
|---|---|---|
| reduce_from_tp | all-reduce | identity |
| reduce_scatter_sequence | reduce-scatter | all-gather |

``enter_region`` is that entry alone, for a tensor that heads on all ranks share.

| function | forward | backward |
|---|---|---|
| enter_region | identity, under sequence parallelism all-gather | all-reduce, under it reduce-scatter |

Between layers of which every rank has all tokens, one may give each rank its share of them.

| function | forward | backward |
|---|---|---|
| take_share | own tokens | all-gather |
| join_shares | all-gather | own tokens |
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_port.core.dist.record import BUFFER, ParameterRecord

# What differs between builds of torch (2.11 to 2.13, CUDA, ROCm, CPU), by feature test.

# torch 2.13 renamed both and warns about the old names on every rank.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@functools.cache
def widening_addmm(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether addmm of ``dtype`` matrices on the device can add its float32 product to a float32 matrix, in place."""
    try:
        total, a = torch.ones(16, 16, device=device), torch.ones(16, 16, device=device, dtype=dtype)
        addmm: Any = torch.addmm
        addmm(total, a, a, out_dtype=torch.float32, out=total)
        return bool((total == 17.0).all())
    except (RuntimeError, TypeError):  # NotImplementedError is a RuntimeError: a CPU, or no such overload
        return False


Group = dist.ProcessGroup | None


def all_reduce_sum(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum over the group, out of place."""
    if group is None:
        return x
    out = x.contiguous().clone()
    dist.all_reduce(out, group=group)
    return out


def all_gather_first(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Concatenate the ranks' tensors along dimension 0: [n, ...] → [n * size, ...]."""
    if group is None:
        return x
    size = dist.get_world_size(group)
    out = torch.empty((x.shape[0] * size, *x.shape[1:]), dtype=x.dtype, device=x.device)
    all_gather_single(out, x.contiguous(), group=group)
    return out


def reduce_scatter_first(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum over the group and keep this rank's piece of dimension 0: [n * size, ...] → [n, ...]."""
    if group is None:
        return x
    size = dist.get_world_size(group)
    if x.shape[0] % size:
        raise ValueError(f"dimension 0 has {x.shape[0]} elements, not divisible by the group's {size} ranks")
    out = torch.empty((x.shape[0] // size, *x.shape[1:]), dtype=x.dtype, device=x.device)
    reduce_scatter_single(out, x.contiguous(), group=group)
    return out


class Started:
    """Collective in flight, and the tensor that it will fill."""

    def __init__(self, work: dist.Work | None, out: torch.Tensor, *inputs: torch.Tensor) -> None:
        self._work, self._out, self._inputs = work, out, inputs  # inputs live until the collective has read them

    def take(self) -> torch.Tensor:
        """Wait for the collective and return its result. On a GPU the stream waits, not the host."""
        if self._work is not None:
            self._work.wait()
        self._inputs = ()
        return self._out


def start_all_reduce(x: torch.Tensor, group: Group) -> Started:
    """Start the sum over the group, in place."""
    return Started(None if group is None else dist.all_reduce(x, group=group, async_op=True), x)


def start_all_gather(x: torch.Tensor, group: Group) -> Started:
    """Start concatenating along dimension 0: [n, ...] → [n * size, ...]."""
    if group is None:
        return Started(None, x)
    x = x.contiguous()
    out = torch.empty((x.shape[0] * dist.get_world_size(group), *x.shape[1:]), dtype=x.dtype, device=x.device)
    return Started(all_gather_single(out, x, group=group, async_op=True), out, x)


def start_reduce_scatter(x: torch.Tensor, group: Group) -> Started:
    """Start a reduce-scatter along dimension 0: [n * size, ...] → [n, ...]."""
    if group is None:
        return Started(None, x)
    x, size = x.contiguous(), dist.get_world_size(group)
    out = torch.empty((x.shape[0] // size, *x.shape[1:]), dtype=x.dtype, device=x.device)
    return Started(reduce_scatter_single(out, x, group=group, async_op=True), out, x)


class _ReduceFromTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        return all_reduce_sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return reduce_scatter_first(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_gather_first(grad, ctx.group), None


def reduce_from_tp(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Leave a tensor-parallel region: partial sums become the sum on every rank."""
    return x if group is None else _ReduceFromTP.apply(x, group)  # type: ignore[no-untyped-call]


def reduce_scatter_sequence(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Partial sums [seq, ...] → this rank's tokens of the sum, [seq/tp, ...]."""
    return x if group is None else _ReduceScatterSequence.apply(x, group)  # type: ignore[no-untyped-call]


class _EnterRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, sequence: bool) -> torch.Tensor:
        ctx.group, ctx.sequence = group, sequence
        return all_gather_first(x, group) if sequence else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        reduce = reduce_scatter_first if ctx.sequence else all_reduce_sum
        return reduce(grad, ctx.group), None, None


def enter_region(x: torch.Tensor, group: Group, sequence_parallel: bool) -> torch.Tensor:
    """Enter a tensor-parallel region, where every rank uses all of x: [seq(/tp), ...] → [seq, ...]; sum gradients."""
    return x if group is None else _EnterRegion.apply(x, group, sequence_parallel)  # type: ignore[no-untyped-call]


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return _own(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_gather_first(grad, ctx.group), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return all_gather_first(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _own(grad, ctx.group).contiguous(), None


def _own(x: torch.Tensor, group: Group) -> torch.Tensor:
    rows = x.shape[0] // dist.get_world_size(group)
    return x.narrow(0, dist.get_rank(group) * rows, rows)


def take_share(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return this rank's tokens [seq/tp, ...] of what all ranks hold alike, [seq, ...]; gradients are gathered."""
    return x if group is None else _Share.apply(x, group)  # type: ignore[no-untyped-call]


def join_shares(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return all ranks' tokens [seq, ...] from this rank's, [seq/tp, ...]; each takes its own tokens' gradient, since
    every rank has all of it."""
    return x if group is None else _Join.apply(x, group)  # type: ignore[no-untyped-call]


# Copies of small tensors from the host to the device that do not block the host.

def to_device_async(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``tensor`` on ``device`` without blocking the host; off the GPU a plain copy, or the tensor itself.

    A copy from pageable memory waits for all work queued on the GPU. From page-locked memory it only joins
    the queue; torch keeps those blocks for later calls, and gives none out again before its copy has ended.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


# State of a model that no gradient changes, with a record like a parameter: a router's balance bias, a running
# statistic.
#
# A buffer is float32 in every run, whatever the weights are. It is saved with the training state, loaded with the
# weights, and never cast or reduced; keeping the copies of several ranks equal is up to the module that changes it.

class Buffered(nn.Module):
    """Module whose buffers stay as they are when it is cast."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        buffers = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._buffers.update(buffers)
        return self


def add_buffer(module: nn.Module, name: str, record: ParameterRecord, device: torch.device) -> torch.Tensor:
    """Register a buffer of ``record.local_shape`` as ``module.<name>``, zero until state is loaded; return it."""
    buffer = torch.zeros(record.local_shape, dtype=torch.float32, device=device)
    buffer.record = replace(record, kind=BUFFER, decay=False)  # type: ignore[attr-defined]
    module.register_buffer(name, buffer, persistent=False)
    return buffer


def recorded_buffers(module: nn.Module, *, below: bool = True) -> list[tuple[ParameterRecord, torch.Tensor]]:
    """Return (record, buffer) for every buffer of ``module``, and of those below it.

    Raises:
        ValueError: one has no record, as after ``module.to(dtype)``, or is not float32.
    """
    out = []
    for name, buffer in module.named_buffers(recurse=below):
        record = getattr(buffer, "record", None)
        if record is None or buffer.dtype != torch.float32:
            kind = str(buffer.dtype).removeprefix("torch.")
            raise ValueError(
                f"buffer {name} is {kind} and {'has no record' if record is None else 'was cast'}: buffers are made by "
                "dist.collectives.add_buffer, stay float32, and a module that has one is not cast or copied"
            )
        out.append((record, buffer))
    return out
