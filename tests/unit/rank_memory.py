"""Bytes that a real rank has allocated, from the allocator's own events (torch's profiler on a CPU)."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_ranks import batches, fake_rank
from torch.profiler import ProfilerActivity, profile

from megatron_port.core.config.checks import check, resolve
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist import collectives
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.layers import fused as cpu_upcast
from megatron_port.core.layers.providers import torch_providers
from megatron_port.core.optim import sharded
from megatron_port.core.pipeline.runner import Departure
from megatron_port.ext.memory import zero3 as unit_gather
from megatron_port.run.build import build_engine, topology_of


@dataclass(frozen=True)
class Measured:
    """Bytes of one rank."""

    held: int
    """Weights, gradient sums, masters and optimizer state."""
    peak: int
    """The most that is allocated at once in a step."""
    padding: int
    """Elements of padding in the rank's buckets."""
    alive: dict[int, int]
    """Size → how many allocations of the step are alive at the peak."""


def held_bytes(engine: Any) -> int:
    """Bytes of the storages of a rank's weights, gradient sums, masters and optimizer state."""
    held = [t for b in engine.sharded.buckets for t in (b.weights, b.shard, b.sums, b.masters, *b.state.values())]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())


def padding(engine: Any) -> int:
    """Elements of padding in a rank's buckets."""
    return sum(b.plan.numel - sum(slot.numel for slot in b.plan.slots) for b in engine.sharded.buckets)


def events_of(step: Any) -> list[Any]:
    """Allocations and frees of a call, in order; ``nbytes()`` is negative for a free."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    assert found.profiler is not None and found.profiler.kineto_results is not None
    return list(found.profiler.kineto_results.events())


def most(changes: list[int]) -> int:
    """Return the largest sum of the first n of these."""
    now = peak = 0
    for size in changes:
        now += size
        peak = max(peak, now)
    return peak


def alive_at_peak(changes: list[int]) -> dict[int, int]:
    """Return how many allocations of each size are alive where the sum of these is largest."""
    now = peak = 0
    alive: Counter[int] = Counter()
    at: dict[int, int] = {}
    for size in changes:
        now += size
        alive[abs(size)] += 1 if size > 0 else -1
        if now > peak:
            peak, at = now, {size: count for size, count in alive.items() if count > 0}
    return at


class _Copied:
    """A collective in flight, and the copy that gloo makes of its whole buffer."""

    def __init__(self, work: Any, copy: torch.Tensor) -> None:
        self._work, self._copy = work, [copy]

    def wait(self, *arguments: Any) -> Any:
        self._copy.clear()
        return self._work.wait(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def with_copies(call: Any, whole: int) -> Any:
    """A collective that allocates what gloo does: argument ``whole`` once more, until it is waited for."""
    def run(*tensors: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        copy = torch.empty_like(tensors[whole])
        work = call(*tensors, group=group, async_op=async_op)
        return _Copied(work, copy) if async_op else work
    return run


def copy_as_gloo_does(patch: pytest.MonkeyPatch) -> None:
    """Let reduce-scatters copy their input, and all-gathers their result, as torch's gloo backend does (the profiler
    shows one allocation of that size in each, and none in all-reduces and sends)."""
    for module in (sharded, unit_gather, collectives):
        for name, whole in (("reduce_scatter_single", 1), ("all_gather_single", 0)):
            if hasattr(module, name):
                patch.setattr(module, name, with_copies(getattr(module, name), whole))


def measure(config: RunConfig, rank: int, *, copies: bool = False) -> Measured:
    """Take two steps on ``rank`` of a run and count the second's allocations; ``copies``: with those of gloo.

    Sends end when the schedule waits for them, as with gloo, which reports no end before; half-precision products are
    widened, as on a processor without instructions for them.
    """
    with pytest.MonkeyPatch.context() as patch, fake_rank(config, rank, initialise=True) as (engine, ctx, resolved):
        patch.setattr(Departure, "free_if_done", lambda departure: departure._payload is None)
        patch.setattr(cpu_upcast, "_has_instructions", lambda dtype: False)
        if copies:
            copy_as_gloo_does(patch)
        return _second_step(engine, batches(resolved, ctx))


def _second_step(engine: Any, mine: list[MicroBatch]) -> Measured:
    engine.train_step(mine[:2], step=0, lr=1e-3)  # buffers are made
    sharded = engine.sharded
    held, pool = held_bytes(engine), sharded.grad_buffer_pool
    buffers = sum(b.grad_buffer.nbytes for b in sharded.buckets if b.grad_buffer is not None)
    buffers += 0 if pool is None else pool.made * pool.size * pool.dtype.itemsize
    events = events_of(lambda: engine.train_step(mine, step=1, lr=1e-3))
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    sizes = [size for _, size in changes]
    peak = most(sizes)
    assert peak > 0, "the profiler recorded no allocation"
    return Measured(held, held + buffers + peak, padding(engine), alive_at_peak(sizes))


def measure_among_others(config: RunConfig, rank: int, port: int) -> Measured:
    """Measure ``rank`` of a run whose other ranks are real processes, over gloo."""
    check(config)
    topology = topology_of(config)
    resolved = resolve(config, topology.world_size)
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    ranks = [
        context.Process(target=_one_of_many, args=(resolved, r, rank, port, results))
        for r in range(topology.world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert all(process.exitcode == 0 for process in ranks), [process.exitcode for process in ranks]
    found: Measured = results.get()
    return found


def _one_of_many(config: RunConfig, rank: int, measured: int, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    topology = topology_of(config)
    cpu_upcast._has_instructions = lambda dtype: False  # type: ignore[assignment]
    store = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=topology.world_size)
    ctx = ParallelContext.create(topology, "cpu")
    engine = build_engine(config, ctx, torch_providers(), initialise=True)
    mine = batches(config, ctx)
    if rank == measured:
        results.put(_second_step(engine, mine))
    else:
        engine.train_step(mine[:2], step=0, lr=1e-3)
        engine.train_step(mine, step=1, lr=1e-3)
    dist.barrier()
    dist.destroy_process_group()
