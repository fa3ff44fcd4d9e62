"""Bytes that a real rank has allocated, from the allocator's own events (torch's profiler on a CPU)."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_ranks import batches, fake_rank
from torch.profiler import ProfilerActivity, profile

from megatron_port.backend import cpu_upcast
from megatron_port.backend.providers import torch_providers
from megatron_port.config.checks import check, resolve
from megatron_port.config.schema import RunConfig
from megatron_port.data.batch import MicroBatch
from megatron_port.parallel.context import ParallelContext
from megatron_port.pipeline.transfer import Departure
from megatron_port.session.assemble import build_engine, topology_of


@dataclass(frozen=True)
class Measured:
    """Bytes of one rank."""

    held: int
    """Weights, gradient sums, masters and optimizer state."""
    peak: int
    """The most that is allocated at once in a step."""
    padding: int
    """Elements of padding in the rank's buckets."""


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


def measure(config: RunConfig, rank: int) -> Measured:
    """Take two steps on ``rank`` of a run and count the second's allocations.

    Sends end when the schedule waits for them, as with gloo, which reports no end before; half-precision products are
    widened, as on a processor without instructions for them.
    """
    with pytest.MonkeyPatch.context() as patch, fake_rank(config, rank, initialise=True) as (engine, ctx, resolved):
        patch.setattr(Departure, "free_if_done", lambda departure: departure._payload is None)
        patch.setattr(cpu_upcast, "_has_instructions", lambda dtype: False)
        return _second_step(engine, batches(resolved, ctx))


def _second_step(engine: Any, mine: list[MicroBatch]) -> Measured:
    engine.train_step(mine[:2], step=0, lr=1e-3)  # buffers are made
    sharded = engine.sharded
    held, pool = held_bytes(engine), sharded.grad_buffer_pool
    buffers = sum(b.grad_buffer.nbytes for b in sharded.buckets if b.grad_buffer is not None)
    buffers += 0 if pool is None else pool.made * pool.size * pool.dtype.itemsize
    events = events_of(lambda: engine.train_step(mine, step=1, lr=1e-3))
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    peak = most([size for _, size in changes])
    assert peak > 0, "the profiler recorded no allocation"
    return Measured(held, held + buffers + peak, padding(engine))


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
