"""Communicators across nodes, as many as the run will open.

A fabric can carry the default group and hang at the next: on MI250X nodes with Slingshot, the first collective of a
second group blocked on every rank in 13 of 17 attempts (laifs-container-recipes #44), while a job with one group
passed each time. The check opens as many as training does, so that a job with tensor or pipeline parallelism does not
find out after its queue time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from megatron_port.core.config.checks import problems, resolve
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist.context import planned
from megatron_port.core.dist.master_store import within
from megatron_port.core.dist.topology import Topology
from megatron_port.core.errors import EnvironmentFault
from megatron_port.tools.preflight.exchange import RankPlacement, synchronize

MOST_SPARE_NODES = 16
"""Nodes to leave out at most until the layout fits the ranks."""


def groups_across_nodes(
    config: RunConfig, world_size: int, ranks_per_node: int, topology_of: Callable[[RunConfig], Topology], *,
    two_way: bool,
) -> int:
    """Return how many communicators that span nodes one rank of the run is in, the default group not counted.

    Args:
        world_size: ranks of this check; spare nodes among them are left out until the layout fits.
        ranks_per_node: ranks on each node.
        topology_of: gives the rank grid of a resolved run.
        two_way: the backend needs a second queue between stages (``nccl``; see ``dist.context.planned``).

    Returns:
        0 where the layout fits no number of nodes up to this one: training refuses it with its own message.
    """
    least = max(0, world_size - MOST_SPARE_NODES * ranks_per_node)
    for world in range(world_size, least, -ranks_per_node):
        if not problems(config, world_size=world):
            topology = topology_of(resolve(config, world))
            return sum(
                any(len({rank // ranks_per_node for rank in members}) > 1 for members in communicator.groups)
                for communicator in planned(topology, two_way=two_way and config.engine == "native"))
    return 0


def open_groups(place: RankPlacement, count: int, timeout_s: float) -> float:
    """Open ``count`` groups over the ranks with this rank's position on their nodes, and use each once. Collective.

    The groups stay open until all are used, as in training, and end with the default group.

    Returns:
        Seconds that this took.

    Raises:
        EnvironmentFault: a group's first collective did not return within ``timeout_s``; the group's number, the
            hosts and the settings to look at.
    """
    begin = time.perf_counter()
    for number in range(1, count + 1):
        what = f"group {number} of {count} across nodes ({place.hosts[0]} … {place.hosts[-1]})"
        failures: list[str] = []
        if not within(timeout_s, partial(_open_and_use, place, failures)):
            failures = [f"its first all-reduce did not return within {timeout_s:.0f} s"]
        if failures:
            raise EnvironmentFault(
                f"{what}: {failures[0]}. The default group works, so nodes and links do; the run would hang like this "
                "while its groups are made. On Slingshot set FI_MR_CACHE_MONITOR=userfaultfd (or kdreg2, where the "
                "node has it), leave NCCL_NET_GDR_LEVEL unset, and check that RCCL's OFI plug-in fits the libfabric "
                "of the system (docs/hangs.md, section 3)")
    return time.perf_counter() - begin


def _open_and_use(place: RankPlacement, failures: list[str]) -> None:
    """Open a group and use it; add what went wrong to ``failures``, as this runs in a thread."""
    try:
        # Every rank walks the same list of groups, so that their automatic names agree without communication.
        for lane in range(max(len(ranks) for ranks in place.members)):
            members = [ranks[lane] for ranks in place.members if lane < len(ranks)]
            group = dist.new_group(members)
            if place.rank in members and len(members) > 1:
                dist.all_reduce(torch.zeros(1, device=place.device), group=group)
        synchronize(place.device)
    except RuntimeError as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        failures.append(f"its first all-reduce failed: {said[:300]}")
