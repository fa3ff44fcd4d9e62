"""What a rank knows of its place in the layout: coordinates, device and process groups.

An object, handed down; two contexts can live in one process. A group of one rank
is None, and everything that takes a group treats None as "nothing to do".
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_port.errors import EnvironmentFault
from megatron_port.parallel.topology import Coordinates, Topology

AXES = ("tp", "dp", "pp")
"""The fixed order in which every rank creates the groups."""


@dataclass(frozen=True, eq=False)
class ParallelContext:
    """Place, device and peers of one rank."""

    topology: Topology
    rank: int
    device: torch.device
    coords: Coordinates
    tp_group: dist.ProcessGroup | None = None
    """Ranks that share each layer."""
    dp_group: dist.ProcessGroup | None = None
    """Replicas of this rank's slice."""
    pp_group: dist.ProcessGroup | None = None
    """The stages, one rank each."""
    embedding_group: dist.ProcessGroup | None = None
    """First and last stage, for tied embeddings; None in between and with one stage."""

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> ParallelContext:
        """One process, no torch.distributed, every group None."""
        return cls(Topology(), 0, torch.device(device), Coordinates(pp=0, dp=0, tp=0))

    @classmethod
    def create(
        cls,
        topology: Topology,
        device: torch.device | str,
        backend: str | None = None,
        *,
        timeout_s: float | None = None,
    ) -> ParallelContext:
        """The context of this rank. Collective: every rank of the default group calls it with the same topology.

        ``backend``: of the new groups (``nccl`` | ``gloo``); None: the default group's. Only members of a
        group connect; for the others its creation is local and takes microseconds, so all ranks walk the
        same list of groups, which keeps their automatic names equal.

        Raises:
            EnvironmentFault: the world has another size than the topology, or there is no default group
                and the topology needs more than one rank.
        """
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world != topology.world_size:
            raise EnvironmentFault(
                f"{world} process{'es are' if world > 1 else ' is'} running, and the layout tp {topology.tp} × "
                f"pp {topology.pp} × dp {topology.dp} needs {topology.world_size}; start {topology.world_size} "
                f"processes or change the layout"
            )
        if not dist.is_initialized():
            return cls.single(device)
        rank = dist.get_rank()
        timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        mine: dict[str, dist.ProcessGroup | None] = dict.fromkeys((*AXES, "embedding"))
        for axis, members in group_list(topology):
            group = dist.new_group(list(members), backend=backend, timeout=timeout)
            if rank in members:
                mine[axis] = group
        return cls(
            topology, rank, torch.device(device), topology.coordinates(rank),
            mine["tp"], mine["dp"], mine["pp"], mine["embedding"],
        )

    @property
    def is_first_stage(self) -> bool:
        """Holds the embedding."""
        return self.coords.pp == 0

    @property
    def is_last_stage(self) -> bool:
        """Holds the head and computes the loss."""
        return self.coords.pp == self.topology.pp - 1

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The group along ``tp``, ``dp``, ``pp`` or of the tied ``embedding``; None: this rank is alone."""
        found: dist.ProcessGroup | None = getattr(self, f"{axis}_group")
        return found

    def close(self) -> None:
        """Destroy the groups (not the default one). The context is of no use afterwards."""
        for axis in (*AXES, "embedding"):
            group = self.group(axis)
            if group is not None:
                dist.destroy_process_group(group)


def group_list(topology: Topology) -> list[tuple[str, tuple[int, ...]]]:
    """All groups of more than one rank as (axis, global ranks), in the order in which they are created."""
    found = [(axis, g) for axis in AXES if getattr(topology, axis) > 1 for g in topology.groups(axis)]
    if topology.pp > 1:
        found += [("embedding", (g[0], g[-1])) for g in topology.groups("pp")]
    return found
