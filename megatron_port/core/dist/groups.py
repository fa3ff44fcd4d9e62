"""Parallel context of a rank: its place on the mesh, its device and its process groups.

An object, handed down; two contexts can live in one process. A group of one rank
is None, and everything that takes a group treats None as "nothing to do".

**Communicators.** One for each group, none for a pair of ranks. NCCL makes a group's communicator at the first
operation on it, in a call that blocks until all ranks of the group have come. If two ranks first use two groups in
different orders, both wait for ever: with 1F1B, stage 0 first opens the queue of gradients, the other stages that of
activations. :meth:`ParallelContext.create` therefore uses every group once, in the order of
``mesh.communicators`` on all ranks (``_warm_up``). The default group must not be bound to a device
(``init_process_group(device_id=)``): every rank would then have to take part in the creation of every group, its own or
not.

NCCL would also make a communicator for each pair of stages if sends and receives were issued one by one (torch: "in
lazy initialization mode ... a new 2-rank NCCL communicator"); ``pipeline.runner`` issues them
batched, which keeps them on the group's own communicator. All operations of a
communicator run in order, so gradients travel on one of their own
(``mesh.REVERSE``), and both queues follow one order of all messages that every
stage knows (``pipeline.schedules``): otherwise two neighbours that each send before
they receive would wait for each other. The exceptions are DeepSpeed's: its grid makes
its own data, model and pipeline groups beside these, and its pipeline sends one by
one over the world group, hence with a communicator for each neighbour.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_port.core.dist.mesh import (
    EMBEDDING,
    REVERSE,
    SHARED,
    WORLD,
    Communicator,
    Coordinates,
    Mesh,
    MeshDims,
    Topology,
    communicators,
    purposes,
)
from megatron_port.core.dist.process import START, ProgressTracker
from megatron_port.core.errors import EnvironmentFault
from megatron_port.core.io.logging import ranks_text

RINGS = ("pp", REVERSE, "cp")
"""Groups whose ranks may send to one another, each to its two neighbours in a ring."""
RELATIONS = (EMBEDDING, REVERSE)
"""Purposes that are no set of axes, or have the ranks of another. Those of shared layers (``SHARED``) are such too."""


def _is_relation(name: str) -> bool:
    return name in RELATIONS or name.startswith(SHARED)


@dataclass(frozen=True, eq=False)
class ParallelContext:
    """Place, device and peers of one rank.

    ``groups``: by the mesh dimensions that their ranks differ along; None where nothing is connected (a dry run on meta
    tensors, one process). ``relations``: the groups that are not over a set of axes, by name.
    """

    topology: Topology
    rank: int
    device: torch.device
    coords: Coordinates
    groups: Mapping[MeshDims, dist.ProcessGroup] | None = None
    relations: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> ParallelContext:
        """Return the context of one process: no torch.distributed, every group None."""
        return cls(Topology(), 0, torch.device(device), Coordinates(pp=0, dp=0, tp=0))

    @classmethod
    def create(
        cls, topology: Topology, device: torch.device | str, backend: str | None = None, *,
        timeout_s: float | None = None, two_way: bool = True, progress: ProgressTracker | None = None,
        options: Callable[[Communicator], object] = lambda communicator: None,
    ) -> ParallelContext:
        """Return the context of this rank, with every communicator made.

        Collective: every rank of the default group calls it with the same topology.

        Only members of a group connect; for the others its creation is local and takes 11 microseconds, so all
        ranks walk the same list, which keeps the groups' automatic names equal without any communication.
        (torch's ``use_local_synchronization`` would skip foreign groups, but it names a group by how many this rank
        is in already, which differs between the stages that tie embeddings and those that do not: a deadlock.)

        Args:
            backend: of the new groups (``nccl`` | ``gloo``); None: the default group's.
            timeout_s: of a collective in them (seconds; None: torch's default).
            two_way: under nccl, a second group of the stages for gradients; only the native engine's pipeline uses it.
            progress: told which communicator is being made, so that the watch can name one that hangs.
            options: returns the backend's options for a communicator's next group (None: its defaults).

        Raises:
            EnvironmentFault: the world has another size than the topology, there is no default group
                and the topology needs more than one rank, or a communicator could not be made.
        """
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world != topology.world_size:
            raise EnvironmentFault(
                f"{world} process{'es are' if world > 1 else ' is'} running, and the layout "
                f"{topology.sizes('×')} needs {topology.world_size}; start {topology.world_size} "
                f"processes or change the layout"
            )
        if not dist.is_initialized():
            return cls.single(device)
        rank = dist.get_rank()
        timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        listed = planned(topology, two_way=two_way and (backend or dist.get_backend()) == "nccl")
        mine: list[tuple[Communicator, dist.ProcessGroup]] = []
        for communicator in listed:
            description = communicator.names[0]
            for members in communicator.groups:
                group = dist.new_group(
                    list(members), backend=backend, timeout=timeout, group_desc=description,
                    pg_options=options(communicator) if rank in members else None,
                )
                if rank in members:
                    mine.append((communicator, group))
        ctx = cls(topology, rank, torch.device(device), topology.coordinates(rank), *_by_use(topology.mesh, mine))
        for communicator, group in mine:
            ctx._warm_up(communicator.names[0], group, progress or ProgressTracker())
        return ctx

    def _warm_up(self, name: str, group: dist.ProcessGroup, progress: ProgressTracker) -> None:
        """Make the communicator of a group by using it, and in a ring the connections between neighbours.

        Every rank is in at most one group of a purpose and comes to the purposes in one order, so a group only waits
        for ranks that are still at an earlier purpose: no deadlock. All messages of the ring are one batch, because
        NCCL also blocks at the first message between two ranks.
        """
        members = dist.get_process_group_ranks(group)
        what = f"communicator {name} ({ranks_text(members)})"
        progress.at(START, what)
        # gloo carries no GPU tensors in point-to-point messages.
        device = torch.device("cpu") if dist.get_backend(group) == "gloo" else self.device
        try:
            dist.all_reduce(torch.zeros(1, device=device), group=group)
            if name in RINGS:
                _greet_neighbours(group, members, self.rank, device)
        except (dist.DistError, RuntimeError) as error:
            raise EnvironmentFault(
                f"rank {self.rank} ({self.coords}): {what} could not be made: {str(error).splitlines()[0]}. A rank of "
                "it ended or hangs, or its network interface cannot be reached: `megatron-port preflight network` "
                "tests each link"
            ) from error

    @property
    def mesh(self) -> Mesh:
        """Mesh of the layout."""
        return self.topology.mesh

    def index(self, *axes: str) -> int:
        """Return this rank's position along a set of axes."""
        return self.mesh.index(self.rank, self.mesh.dims(*axes))

    def size(self, *axes: str) -> int:
        """Return the number of ranks along a set of axes."""
        return self.mesh.size(self.mesh.dims(*axes))

    def over(self, *axes: str) -> dist.ProcessGroup | None:
        """Return the group of ranks that differ from this one along these axes only; None where this rank is alone.

        Layers and engines hold what this returns: a look-up takes a microsecond or two.

        Raises:
            KeyError: no group over this set was made (``mesh.SETS``), or the mesh has no such axis.
        """
        return self.along(self.mesh.dims(*axes), "+".join(axes))

    def along(self, dims: MeshDims, name: str = "") -> dist.ProcessGroup | None:
        """Return the group over a set of mesh dimensions; see :meth:`over`."""
        if not dims or self.groups is None:
            return None
        if dims not in self.groups:
            raise KeyError(f"no communicator over {name or sorted(dims)} was made; add the set to mesh.SETS")
        return self.groups[dims]

    @property
    def world_group(self) -> dist.ProcessGroup | None:
        """All ranks of the run, on a communicator of its own."""
        return self.along(self.mesh.everything, WORLD)

    @property
    def embedding_group(self) -> dist.ProcessGroup | None:
        """First and last stage, for tied embeddings; None in between and with one stage."""
        return self.relations.get(EMBEDDING)

    def tied_group(self, key: str | None) -> dist.ProcessGroup | None:
        """Return the stages that hold a copy of a parameter, by its record's ``tied_key``; None: no other does."""
        if key is None:
            return None
        return self.relations.get(key) if SHARED in key else self.embedding_group

    @property
    def reverse_group(self) -> dist.ProcessGroup | None:
        """Second group of the stages, for gradients; None where the backend needs no second queue (gloo)."""
        return self.relations.get(REVERSE)

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank's stage holds the embedding."""
        return self.coords.pp == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank's stage holds the head and computes the loss."""
        return self.coords.pp == self.topology.last_stage

    def named_groups(self) -> dict[str, dist.ProcessGroup]:
        """Return the groups that this rank is in, by the names of their purposes, in the order of their creation."""
        out = {}
        for communicator in planned(self.topology, two_way=REVERSE in self.relations):
            for name in communicator.names:
                group = self.relations.get(name) if _is_relation(name) else self._of_purpose(name)
                if group is not None:
                    out[name] = group
        return out

    def _of_purpose(self, name: str) -> dist.ProcessGroup | None:
        return self.world_group if name == WORLD else self.over(*name.split("+"))

    def close(self) -> None:
        """Destroy the groups, except the default one. The context cannot be used afterwards."""
        for group in dict.fromkeys([*(self.groups or {}).values(), *self.relations.values()]):
            # If a peer died, the error that reported it must not be hidden by another.
            with suppress(dist.DistError, RuntimeError):
                dist.destroy_process_group(group)


def _greet_neighbours(group: dist.ProcessGroup, members: list[int], rank: int, device: torch.device) -> None:
    """Exchange one number with the next and the previous rank of the ring, so that both connections are made."""
    at, count = members.index(rank), len(members)
    peers = {members[(at + 1) % count], members[(at - 1) % count]}
    ops = []
    for peer in sorted(peers):
        ops.append(dist.P2POp(dist.isend, torch.zeros(1, device=device), peer, group))
        ops.append(dist.P2POp(dist.irecv, torch.zeros(1, device=device), peer, group))
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def planned(topology: Topology, *, two_way: bool = False) -> list[Communicator]:
    """Return the communicators of a layout in the order in which every rank creates them.

    ``two_way``: the stages once more, for gradients.
    """
    mesh = topology.mesh
    listed = purposes(mesh, tied_ends=topology.last_stage != 0, reverse=two_way, shared=topology.shared)
    return communicators(mesh, listed)


def _by_use(
    mesh: Mesh, mine: list[tuple[Communicator, dist.ProcessGroup]]
) -> tuple[dict[MeshDims, dist.ProcessGroup], dict[str, dist.ProcessGroup]]:
    """This rank's groups by the mesh dimensions that they lie along, and the relations by name."""
    groups: dict[MeshDims, dist.ProcessGroup] = {}
    relations: dict[str, dist.ProcessGroup] = {}
    for communicator, group in mine:
        name = communicator.names[0]
        if _is_relation(name):
            relations[name] = group
        else:
            groups[mesh.everything if name == WORLD else mesh.dims(*name.split("+"))] = group
    return groups, relations
