"""Are the copies of replicated parameters still equal on every rank?

Drift is silent: a gradient that one rank does not sum lets its copy walk away
while the loss still falls. Each rank hashes its copies to one 64-bit number a
parameter; over each group of replicas minimum and maximum must agree.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_port.engine.api import Engine
from megatron_port.errors import NumericsError
from megatron_port.parallel.context import ParallelContext
from megatron_port.parallel.counter import random_bits
from megatron_port.runtime.agreement import agree


def bits_hash(tensor: torch.Tensor) -> torch.Tensor:
    """A 64-bit hash of a tensor's bits that depends on positions: int64 scalar on its device."""
    raw = tensor.detach().contiguous().view(torch.uint8).view(-1)
    width = {8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.element_size()]
    words = raw.view(width).to(torch.int64)
    position = torch.arange(words.numel(), dtype=torch.int64, device=words.device)
    return random_bits(words, position).sum()


def check_replicas(engine: Engine, ctx: ParallelContext, *, step: int) -> None:
    """Collective. Raises NumericsError on every rank naming the first parameter whose copies differ, and where."""
    found: NumericsError | None = None
    pairs = list(engine.named_parameters())
    hashes = torch.stack([bits_hash(p) for _, p in pairs])
    axes = (
        ("dp", ctx.dp_group, [True] * len(pairs)),
        ("tp", ctx.tp_group, [not r.is_split for r, _ in pairs]),
        ("embedding", ctx.embedding_group, [r.tied_key is not None for r, _ in pairs]),
    )
    for axis, group, use in axes:
        chosen = torch.tensor([i for i, u in enumerate(use) if u], dtype=torch.int64, device=hashes.device)
        if group is None or not len(chosen):
            continue
        low, high = hashes[chosen].clone(), hashes[chosen].clone()
        dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
        dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
        bad = (low != high).nonzero().flatten().tolist()
        if bad and found is None:
            names = [pairs[int(chosen[i])][0].name for i in bad]
            found = NumericsError(
                f"after step {step} {len(names)} replicated parameters differ over the {axis} group of {ctx.coords}, "
                f"the first {names[0]}; resume from an earlier checkpoint, and report the layout"
            )
    agree(found, where=str(ctx.coords))
