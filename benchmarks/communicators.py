"""Time to list and to create the communicators of a large layout on one rank: torch's fake process group, no network.

``python benchmarks/communicators.py`` prints a line for 3,072 and one for 24,576 ranks (evidence/performance.md). The
real backends are lazy: a rank connects only in groups of its own, so for all others creation is this local cost.
"""

from __future__ import annotations

import time

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_port.core.dist.groups import ParallelContext, planned
from megatron_port.core.dist.mesh import Topology

LAYOUTS = (Topology(tp=8, pp=64, dp=6), Topology(tp=8, pp=64, dp=48, shard=6, ep=16))


def main() -> None:
    """Measure each layout."""
    for topology in LAYOUTS:
        started = time.perf_counter()
        listed = planned(topology)
        listing = time.perf_counter() - started
        groups = sum(len(c.groups) for c in listed)
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=topology.world_size)
        started = time.perf_counter()
        ctx = ParallelContext.create(topology, "cpu")
        creating = time.perf_counter() - started
        print(
            f"{topology.world_size:,} ranks: {groups:,} groups for {', '.join(c.names[0] for c in listed)}; "
            f"listed in {listing:.3f} s, made in {creating:.3f} s, {1e6 * creating / groups:.1f} µs a group; "
            f"{len(ctx.groups or {}) + len(ctx.relations)} on this rank"
        )
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
