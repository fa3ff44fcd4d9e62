"""Facts that a rank is given when it starts: its process, its device, and the fence of the run's folder.

``run`` finds all three out (``run.discovery``, ``run.device``, ``run.lease``); a step only reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron_port.core.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ProcessInfo:
    """One process of the run."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    master_addr: str
    master_port: int
    """0: any free port (a single process)."""
    launcher: str
    """torchrun | slurm | local (--nproc) | single | a name of ``launchers.LAUNCHERS``"""
    hostname: str
    agent_store: bool = False
    """torchrun's agent already serves the store at the master's address; rank 0 must not bind it."""
    attempt: str = "0"
    """Tells restarts apart that use one store."""
    sources: dict[str, str] = field(default_factory=dict)
    """Field → what it was read from."""
    conflicts: list[str] = field(default_factory=list)
    """Sources that disagreed with the values above and were not used."""
    secret: str = field(default="", repr=False)
    """Secret of this attempt's ranks: never printed, never sent; keys are derived from it. Empty: none."""
    nodes: tuple[tuple[str, int], ...] = ()
    """Host and number of ranks of each node in rank order, where the launcher tells (a SLURM step in blocks)."""

    def node_of(self, rank: int) -> int:
        """Index of a rank's node; without ``nodes`` every node is taken to have as many ranks as this one."""
        if not self.nodes:
            return rank // max(self.local_world_size, 1)
        before = 0
        for index, (_, count) in enumerate(self.nodes):
            before += count
            if rank < before:
                return index
        return len(self.nodes)

    def host_of(self, rank: int) -> str | None:
        """A rank's host, where it is known without asking the rank."""
        if self.num_nodes == 1:
            return self.hostname
        node = self.node_of(rank)
        return self.nodes[node][0] if node < len(self.nodes) else None

    def describe(self) -> str:
        """Lines for the log of rank 0: every value with its source, then the conflicts."""
        names = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes",
                 "master_addr", "master_port")
        lines = [f"{name} {getattr(self, name)} ({self.sources.get(name, 'default')})" for name in names]
        head = f"launcher: {self.launcher}; " + ", ".join(lines)
        return "\n".join([head, *(f"conflict: {c}" for c in self.conflicts)])


@dataclass(frozen=True)
class DeviceInfo:
    """The device of one rank."""

    kind: str
    """cpu | cuda | rocm"""
    torch_device: torch.device
    comm_backend: str
    """nccl | gloo: of the groups that move tensors of this device."""
    name: str
    memory_bytes: int
    """Memory of the device; for the CPU, of the host."""
    why: str
    """Reason of the choice."""
    identity: str = ""
    """UUID and PCI address of a GPU, unique on its host; ``run.rendezvous.start`` compares them."""

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU, cuda or rocm."""
        return self.kind != "cpu"


class LeaseLost(ConfigError):
    """Another attempt took the run folder over, so this one must stop. Exit 2: it must not be started again."""


class Fence:
    """Check made before anything is written into a run folder. This one allows all: no lease, or not rank 0.

    Attributes:
        epoch: of the attempt; 0: none.
        run: id of the run; empty until it is known.
    """

    def __init__(self, epoch: int = 0, attempt: str = "") -> None:
        self.epoch, self.attempt, self.run = epoch, attempt, ""

    @property
    def lost(self) -> bool:
        """Another attempt was seen to have taken over."""
        return False

    def check(self) -> None:
        """Raise LeaseLost if another attempt has taken over. Reads the folder."""
