"""One real rank of a layout of any size in this process: torch's ``fake`` process group answers for all the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_port.core.config.checks import check, resolve
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.positions import sequence_partition
from megatron_port.core.engine.api import Engine
from megatron_port.core.layers.providers import torch_providers
from megatron_port.core.pipeline.runner import Arrival
from megatron_port.ext.context.attention import RingStep
from megatron_port.run.build import build_engine, topology_of


@contextmanager
def fake_rank(
    config: RunConfig, rank: int, *, initialise: bool = False
) -> Iterator[tuple[Engine, ParallelContext, RunConfig]]:
    """Engine and context of ``rank`` of the run; what it sends goes nowhere, what it receives is zero."""
    check(config)
    layout = config.layout
    topology = topology_of(replace(config, layout=replace(layout, data_parallel_size=layout.data_parallel_size or 1)))
    config = resolve(config, topology.world_size)
    take, step, exchange = Arrival.take, RingStep.take, dist.all_to_all_single

    def balanced(out: torch.Tensor, mine: torch.Tensor, *sizes: Any, **options: Any) -> Any:
        """All ranks send as many rows of each expert as this one, so that it receives as many as it sends."""
        work = exchange(out, mine, *sizes, **options)
        out.copy_(mine)
        return work

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", balanced)
        patch.setattr(Arrival, "take", lambda arrival: tuple(x.zero_() for x in take(arrival)))
        patch.setattr(RingStep, "take", lambda passing: step(passing).zero_())
        if topology.world_size > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=topology.world_size)
        try:
            ctx = ParallelContext.create(topology, "cpu")
            yield build_engine(config, ctx, torch_providers(), initialise=initialise), ctx, config
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def batches(config: RunConfig, ctx: ParallelContext) -> list[MicroBatch]:
    """This rank's micro-batches of one step."""
    b, s = config.batch.micro_batch_size, config.model.seq_length
    count = config.batch.global_batch_size // (b * ctx.topology.dp)
    held = sequence_partition(ctx.mesh, ctx.rank, order=config.layout.cp_order).held(s)
    ids = held.take(torch.arange(b * s).reshape(b, s) % config.model.vocab_size, dim=1)
    return [
        MicroBatch(tuple(range(i * b, (i + 1) * b)), ids if ctx.is_first_stage else None,
                   ids if ctx.is_last_stage else None, None)
        for i in range(count)
    ]


class Traffic(TorchDispatchMode):
    """Bytes of the buffers that were handed to collectives and sends, by (axis, kind)."""

    KINDS: dict[str, tuple[str, int]] = {  # noqa: RUF012
        "allreduce_": ("all-reduce", 0), "_allgather_base_": ("all-gather", 0),
        "_reduce_scatter_base_": ("reduce-scatter", 1), "alltoall_base_": ("all-to-all", 1), "send": ("send", 0),
        "broadcast_": ("broadcast", 0), "reduce_": ("reduce", 0),
    }
    """c10d's operation → (kind, which argument is the whole buffer)."""

    def __init__(self, ctx: ParallelContext) -> None:
        super().__init__()
        self.bytes: dict[tuple[str, str], int] = {}
        self.other: set[str] = set()
        # Purposes over the same ranks share a group; it goes by the first of them.
        self.axes = {g.group_name: axis for axis, g in reversed(ctx.named_groups().items())}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.partition("::")[2]
            if name in self.KINDS:
                kind, at = self.KINDS[name]
                tensors = args[at] if isinstance(args[at], (list, tuple)) else [args[at]]
                groups = [dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject) and
                          "ProcessGroup" in str(a._type())]
                key = (self.axes.get(groups[0].group_name, "?"), kind)
                self.bytes[key] = self.bytes.get(key, 0) + sum(t.numel() * t.element_size() for t in tensors)
            elif name not in ("recv_",):
                self.other.add(name)
        return func(*args, **(kwargs or {}))
