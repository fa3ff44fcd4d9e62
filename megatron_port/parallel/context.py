"""What a rank knows of its place in the layout: coordinates, device and process groups.

An object, handed down; two contexts can live in one process. A group of one rank
is None, and everything that takes a group treats None as "nothing to do".

**Communicators.** One for each group, none for a pair of ranks. NCCL makes a group's communicator at the first
operation on it, in a call that blocks until all ranks of the group have come. If two ranks first use two groups in
different orders, both wait for ever: with 1F1B, stage 0 first opens the queue of gradients, the other stages that of
activations. :meth:`ParallelContext.create` therefore uses every group once, in the order of ``ALL`` on all ranks
(``_warm_up``). The default group must not be bound to a device (``init_process_group(device_id=)``): every rank
would then have to take part in the creation of every group, its own or not.

NCCL would also make a communicator for each pair of stages if sends and receives were issued one by one (torch: "in
lazy initialization mode ... a new 2-rank NCCL communicator"); ``pipeline.transfer`` issues them
batched, which keeps them on the group's own communicator. All operations of a
communicator run in order, so gradients travel on one of their own
(``pp_reverse_group``), and both queues follow one order of all messages that every
stage knows (``pipeline.messages``): otherwise two neighbours that each send before
they receive would wait for each other. The exceptions are DeepSpeed's: its grid makes
its own data, model and pipeline groups beside these, and its pipeline sends one by
one over the world group, hence with a communicator for each neighbour.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_port.errors import EnvironmentFault
from megatron_port.parallel.topology import Coordinates, Topology
from megatron_port.runtime.progress import START, ProgressTracker
from megatron_port.runtime.rendezvous import ranges

AXES = ("tp", "dp", "pp")
"""The fixed order in which every rank creates the groups."""
ALL = (*AXES, "embedding", "pp_reverse", "kv")
"""The order in which every rank makes the communicators of the groups that it is in."""
STAGES = ("pp", "pp_reverse")
"""Groups whose ranks also send to one another, each to its two neighbours in the ring of stages."""


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
    pp_reverse_group: dist.ProcessGroup | None = None
    """The stages again, for gradients on their way back; None where the backend needs no second queue (gloo)."""
    kv_group: dist.ProcessGroup | None = None
    """Neighbouring tensor ranks that hold the same key/value heads; ``tp_group`` itself where all do."""

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
        two_way: bool = True,
        progress: ProgressTracker | None = None,
    ) -> ParallelContext:
        """Return the context of this rank, with every communicator made.

        Collective: every rank of the default group calls it with the same topology.

        Only members of a group connect; for the others its creation is local and takes 11 microseconds, so all
        ranks walk the same list, which keeps the groups' automatic names equal without a word between the ranks:
        0.03 s for the 992 groups of 3,072 ranks (tp 8 × pp 64 × dp 6), 0.14 s for 24,576. (torch's
        ``use_local_synchronization`` would skip foreign groups, but it names a group by how many this rank
        is in already, which differs between the stages that tie embeddings and those that do not: a deadlock.)

        Args:
            backend: of the new groups (``nccl`` | ``gloo``); None: the default group's.
            timeout_s: of a collective in them (seconds; None: torch's default).
            two_way: under nccl, a second group of the stages for gradients; only the native engine's pipeline uses it.
            progress: told which communicator is being made, so that the watch can name one that hangs.

        Raises:
            EnvironmentFault: the world has another size than the topology, there is no default group
                and the topology needs more than one rank, or a communicator could not be made.
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
        mine: dict[str, dist.ProcessGroup | None] = dict.fromkeys(ALL)
        kind = backend or dist.get_backend()
        for axis, members in group_list(topology, two_way=two_way and kind == "nccl"):
            group = dist.new_group(list(members), backend=backend, timeout=timeout, group_desc=axis)
            if rank in members:
                mine[axis] = group
        if topology.kv_copies == topology.tp:
            mine["kv"] = mine["tp"]
        ctx = cls(
            topology, rank, torch.device(device), topology.coordinates(rank),
            mine["tp"], mine["dp"], mine["pp"], mine["embedding"], mine["pp_reverse"], mine["kv"],
        )
        for axis in ALL:
            ctx._warm_up(axis, progress or ProgressTracker())
        return ctx

    def _warm_up(self, axis: str, progress: ProgressTracker) -> None:
        """Make the communicator of a group by using it, and in a ring of stages the connections between neighbours.

        Every rank is in at most one group of an axis and comes to the axes in one order, so a group only waits
        for ranks that are still at an earlier axis: no cycle. All messages of the ring are one batch, because NCCL
        also blocks at the first message between two ranks.
        """
        group = self.group(axis)
        if group is None:
            return
        members = dist.get_process_group_ranks(group)
        what = f"communicator {axis} ({ranges(members)})"
        progress.at(START, what)
        # gloo carries no GPU tensors in point-to-point messages.
        device = torch.device("cpu") if dist.get_backend(group) == "gloo" else self.device
        try:
            dist.all_reduce(torch.zeros(1, device=device), group=group)
            if axis in STAGES:
                _greet_neighbours(group, members, self.rank, device)
        except (dist.DistError, RuntimeError) as error:
            raise EnvironmentFault(
                f"rank {self.rank} ({self.coords}): {what} could not be made: {str(error).splitlines()[0]}. A rank of "
                "it ended or hangs, or its network interface cannot be reached: `megatron-port preflight network` "
                "tests each link"
            ) from error

    @property
    def is_first_stage(self) -> bool:
        """Holds the embedding."""
        return self.coords.pp == 0

    @property
    def is_last_stage(self) -> bool:
        """Holds the head and computes the loss."""
        return self.coords.pp == self.topology.last_stage

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The group along ``tp``, ``dp``, ``pp``, ``pp_reverse``, of the tied ``embedding`` or of the copies of ``kv``
        heads; None: there is none."""
        found: dist.ProcessGroup | None = getattr(self, f"{axis}_group")
        return found

    def close(self) -> None:
        """Destroy the groups (not the default one). The context is of no use afterwards."""
        for group in dict.fromkeys(self.group(axis) for axis in ALL):
            if group is not None:
                # If a peer died, the error that told so must not be hidden by another.
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


def _along(topology: Topology, axis: str) -> Iterator[tuple[int, ...]]:
    """``topology.groups(axis)`` in the same order, by strides: 3,072 ranks in 1 ms instead of 0.3 s."""
    stride = {"tp": 1, "dp": topology.tp, "pp": topology.tp * topology.dp}[axis]
    span = stride * int(getattr(topology, axis))
    for block in range(0, topology.world_size, span):
        for first in range(block, block + stride):
            yield tuple(range(first, first + span, stride))


def group_list(topology: Topology, *, two_way: bool = False) -> list[tuple[str, tuple[int, ...]]]:
    """All groups of more than one rank as (axis, global ranks), in the order in which they are created.

    ``two_way``: the stages once more, as ``pp_reverse``.
    """
    found = [(axis, g) for axis in AXES if getattr(topology, axis) > 1 for g in _along(topology, axis)]
    if topology.pp > 1:
        stages = list(_along(topology, "pp"))
        if topology.last_stage != 0:
            found += [("embedding", (g[0], g[-1])) for g in stages]
        found += [("pp_reverse", g) for g in stages if two_way]
    if 1 < topology.kv_copies < topology.tp:
        size = topology.kv_copies
        found += [("kv", tuple(range(first, first + size))) for first in range(0, topology.world_size, size)]
    return found
