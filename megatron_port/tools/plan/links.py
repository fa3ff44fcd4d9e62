"""How long a collective or a transfer takes on the levels of a cluster: package, node, network, group of nodes.

Ranks are placed tensor parallel innermost, then data (and context) parallel, then pipeline, as ``dist.mesh``
does. A ring over r ranks moves 2(r−1)/r of the buffer past each rank for an all-reduce, half of that for a
reduce-scatter or an all-gather, in as many hops. Where a group spans nodes, its ranks on one node share
the node's adapters with the other groups of that node, and the slowest level bounds the ring. An all-reduce takes a
tree (2·log2 of the nodes hops) where its latency is less; for reduce-scatters and all-gathers NCCL and RCCL have rings
alone (``src/graph/tuning.cc``; arXiv 2504.18658). Within a node, where the cluster's table has measured collectives by
ranks and bytes, these seconds are times the ratio that was measured: short rings and small buffers fill links less.

Out of a group of the network (a dragonfly's, a pod) goes what ranks send beyond its nodes while all groups of ranks
do the same. The neighbours of rings and transfers are d nodes apart, so the last d nodes of each group of g send out,
d / g of all of them; an all-to-all over n nodes sends 1 − g / n. The links have ``group_taper`` of the bandwidth of the
adapters, on a dragonfly half of that: traffic between two groups takes a detour (Kim et al., ISCA 2008). Where flows
are hashed onto ``group_uplinks`` links instead of spread over them, some share one while others are idle. A ring runs
at the pace of the busiest link, an all-to-all at their mean: Hoefler et al. (CLUSTER 2008) measured 55 to 60 % of the
rated bisection so, where 1 - 1/e of the links have a flow. With ``rails`` a switch has one adapter of each node, and a
ring that changes its adapter within a node sends all of its traffic over those links. NCCL closes such rings through
another device from 2.12 on (PXN; NVIDIA/nccl issue 2193).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_port.core.errors import ConfigError
from megatron_port.tools.plan.case import Case, Machine
from megatron_port.tools.plan.kernel_table import KernelTable


@dataclass(frozen=True)
class Span:
    """A group of ranks: how many, how many of them on one node, and the distance in ranks between neighbours."""

    size: int
    stride: int
    local: int
    """Ranks of the group on one node."""

    @property
    def nodes(self) -> int:
        """Nodes that the group touches."""
        return -(-self.size // self.local)


def domain(machine: Machine) -> int:
    """Devices that reach one another without the network: a node's, or those of several nodes in one rack."""
    return max(machine.hardware.domain_devices, machine.cluster.gpus_per_node)


def scattered(machine: Machine) -> Machine:
    """The machine of a job whose nodes lie anywhere: nearly all traffic leaves its group, and goes to all others."""
    spread = replace(machine.hardware, nodes_per_group=1, dragonfly=False)
    return replace(machine, hardware=spread) if machine.hardware.nodes_per_group else machine


def span(machine: Machine, size: int, stride: int) -> Span:
    """The span of ``size`` ranks, ``stride`` apart."""
    node = domain(machine)
    if (size - 1) * stride < node:  # all on one node, also where the distance does not divide it
        return Span(size=size, stride=stride, local=size)
    local = max(1, min(size, node // stride)) if stride < node else 1
    return Span(size=size, stride=stride, local=local)


def used_links(flows: int, links: int) -> float:
    """Expected number of ``links`` with a flow, of ``flows`` hashed onto them."""
    return links * (1 - (1 - 1 / links) ** flows)


@lru_cache(maxsize=1024)
def busiest_link(flows: int, links: int, groups: int = 1) -> float:
    """Expected flows of the busiest link, of ``groups`` groups that each hash ``flows`` flows onto ``links`` links.

    The sum over t of the chance that some link has t flows or more, links taken as independent.
    """
    below, each, expected = 0.0, (1 - 1 / links) ** flows, 0.0
    for t in range(flows):
        below += each  # at most t flows on a link
        expected += 1 - min(below, 1.0) ** (links * groups)
        each *= (flows - t) / (t + 1) / max(links - 1, 1)
    return max(expected, flows / links, 1.0)


@dataclass(frozen=True)
class Links:
    """Bandwidths (bytes/s, one way, achieved) and hop latencies (s) of a cluster after calibration."""

    machine: Machine
    package: float
    node: float
    adapters: float
    """Bandwidth of all adapters of a node, or of the nodes of a domain (``hardware.domain_devices``)."""
    near: float
    far: float
    table: KernelTable | None = None
    """Measured collectives, used beside the formulas."""

    @classmethod
    def of(cls, machine: Machine) -> Links:
        """Links of a machine."""
        h, scale = machine.hardware, machine.calibration.network_scale
        return cls(
            machine=machine, package=h.package_gb * 1e9 * h.node_efficiency * scale,
            node=h.node_gb * 1e9 * h.node_efficiency * scale,
            adapters=h.nics * h.nic_gb * 1e9 * h.network_efficiency * scale * domain(machine)
            / machine.cluster.gpus_per_node,
            near=h.node_latency_us * 1e-6, far=h.network_latency_us * 1e-6, table=machine.table,
        )

    def network_share(self, group: Span, *, to_all: bool = False) -> float:
        """Bandwidth of one group through a node's adapters, which all groups of the node use at once.

        ``to_all``: ranks send to all of their group, not to neighbours.
        """
        if not self.adapters:
            raise ConfigError(
                f"{group.size} ranks {group.stride} apart span {group.nodes} nodes, but {self.machine.cluster.name} "
                "has no network (hardware.nics is 0); keep the run on one node, or describe the network"
            )
        return self.adapters * group.local / domain(self.machine) * self._beyond_groups(group, to_all=to_all)

    def _beyond_groups(self, group: Span, *, to_all: bool) -> float:
        """Share of the adapters' bandwidth that the links out of the network's groups leave (1: all)."""
        h = self.machine.hardware
        apart = max(1, group.stride // domain(self.machine))
        nodes = group.nodes * apart
        changes = h.rails and not to_all and group.local > 1 and group.stride >= max(domain(self.machine) // h.nics, 2)
        if not h.nodes_per_group or (nodes <= h.nodes_per_group and not changes):
            return 1.0
        leaves = 1 - h.nodes_per_group / nodes if to_all else min(1.0, apart / h.nodes_per_group)
        leaves = 1.0 if changes else leaves
        if not h.group_uplinks:
            return min(1.0, h.group_taper / (2 if h.dragonfly else 1) / leaves)
        adapters, switches = (1, h.nics) if h.rails else (h.nics, 1)
        link = h.group_taper * h.nodes_per_group * adapters / h.group_uplinks  # by the bandwidth of an adapter
        flows = max(1, round(leaves * min(nodes, h.nodes_per_group) * adapters))
        if to_all:
            return min(1.0, link * used_links(flows, h.group_uplinks) / flows)
        return min(1.0, link / busiest_link(flows, h.group_uplinks, math.ceil(nodes / h.nodes_per_group) * switches))

    def local_bandwidth(self, group: Span) -> float:
        """Ring bandwidth of the ranks of a group that share a node."""
        h = self.machine.hardware
        if group.stride == 1 and group.local <= h.package_devices and h.package_devices > 1:
            return self.package
        return self.node

    def collective(self, size: float, group: Span, *, kind: str = "all-reduce") -> float:
        """Seconds of one collective over ``size`` bytes (the whole buffer). kind: all-reduce | reduce-scatter |
        all-gather | half (either of the last two)."""
        r = group.size
        if r <= 1 or size <= 0:
            return 0.0
        rounds = 2 if kind == "all-reduce" else 1
        share = rounds * (r - 1) / r * size
        if group.nodes == 1:
            return self.within(size, r, self.local_bandwidth(group), rounds) / self._measured(kind, group, size)
        bandwidth = self.network_share(group)
        if group.local > 1:
            bandwidth = min(bandwidth, self.local_bandwidth(group))
        ring = rounds * ((r - group.nodes) * self.near + (group.nodes - 1) * self.far)
        tree = rounds * (group.local * self.near + math.ceil(math.log2(group.nodes)) * self.far)
        return share / bandwidth + (min(ring, tree) if kind == "all-reduce" else ring)

    def overlap_share(self, kind: str, size: float, group: Span) -> float:
        """Share of a collective of so many bytes that products beside it hide, of what they could."""
        measured = None if self.table is None or group.nodes > 1 else self.table.rate(f"{kind}-hidden", "", size)
        return self.machine.calibration.overlap_share if measured is None else measured

    def region(self, size: float, group: Span, *, sequence: bool, backward: bool, dtype: str) -> float | None:
        """Seconds that the exchanges at the ends of a tensor-parallel region add to a pass, as they were measured in
        the pattern of a layer; None: they were not. ``size``: bytes of the activation.
        """
        op = f"{'sequence' if sequence else 'tensor'}-{'backward' if backward else 'forward'}"
        table = self.table
        if table is None or group.nodes > 1 or group.size == 1 or not table.has(op, "", dtype):
            return None

        bandwidth = self.local_bandwidth(group)

        def formula(n: float, ranks: int) -> float:  # two halves under sequence parallelism, which take as long
            return self.within(n, ranks, bandwidth, 2)

        return self._tabled(table, op, dtype, size, group, formula)

    @staticmethod
    def _tabled(
        table: KernelTable, op: str, dtype: str, size: float, group: Span, formula: Callable[[float, int], float]
    ) -> float:
        def rate(shape: tuple[float, ...]) -> float:
            return shape[1] / formula(shape[1], int(shape[0])) / 1e9

        return formula(size, group.size) / (table.ratio(op, "", dtype, (group.size, size), rate) or 1.0)

    def within(self, size: float, ranks: int, bandwidth: float, rounds: int) -> float:
        """Seconds of a ring over the ranks of one node by the formula."""
        return rounds * (ranks - 1) * (size / ranks / bandwidth + self.near)

    def _measured(self, kind: str, group: Span, size: float) -> float:
        """Measured over planned rate of a collective within a node; 1 where the table has nothing near.

        A table without reduce-scatters and all-gathers of its own has them as halves of its all-reduces: their rings
        send the same pieces in half as many rounds. ``half``: the mean of both.
        """
        table = self.table
        if table is None:
            return 1.0
        halves = ("reduce-scatter", "all-gather")
        if kind == "half" and all(map(table.group, halves)):
            return 2 / sum(1 / self._measured(one, group, size) for one in halves)
        rounds, bandwidth = 2 if kind == "all-reduce" else 1, self.local_bandwidth(group)
        op = halves[0] if kind == "half" else kind
        own = bool(table.group(op))

        def formula(shape: tuple[float, ...]) -> float:
            ranks, whole = shape
            return whole / self.within(whole, int(ranks), bandwidth, rounds if own else 2) / 1e9

        return table.ratio(op if own else "all-reduce", "", "", (group.size, size), formula) or 1.0

    def all_to_all(self, size: float, group: Span, outside: float = 0.0) -> float:
        """Seconds in which every rank of a group sends ``size`` bytes, as many to each rank.

        ``outside``: of them those that leave the node, where a program sends other than its share there.
        """
        r = group.size
        if r <= 1 or size <= 0:
            return 0.0
        inside = size * (group.local - 1) / r / self.local_bandwidth(group)
        if group.nodes == 1:
            return inside + self.near
        outside = outside or size * (r - group.local) / r
        alone = self.network_share(group, to_all=True) / group.local  # each rank sends for itself
        return max(inside, outside / alone) + self.far

    def hop(self, size: float, group: Span) -> float:
        """Seconds in which every rank of a group sends ``size`` bytes to the next one."""
        if group.size <= 1 or size <= 0:
            return 0.0
        inside = size / self.local_bandwidth(group) if group.local > 1 else 0.0
        if group.nodes == 1:
            return inside + self.near
        return max(inside, size / (self.network_share(group) / group.local)) + self.far

    def _near_transfer(self, size: float) -> float:
        """Seconds from one device to another of its node."""
        def formula(n: float, ranks: int) -> float:
            return n / self.node + self.near

        pair = Span(size=2, stride=1, local=2)
        return formula(size, 2) if self.table is None else self._tabled(self.table, "transfer", "", size, pair, formula)

    def transfer(self, size: float, case: Case) -> float:
        """Seconds of one activation between neighbouring stages, while all ranks of a node do the same."""
        distance = case.tp * case.dp * case.cp
        node = domain(self.machine)
        size, again = case.engine.message(case, self, size)
        if distance * case.pp <= node:
            return self._near_transfer(size) + again
        # Of the stages on one node only the last sends out; all of its ranks do so at the same time.
        bandwidth = self.network_share(Span(size=2, stride=max(distance, node), local=1))
        crossing = min(node, distance)
        bandwidth *= node / crossing
        single = self.machine.hardware.nics * node / self.machine.cluster.gpus_per_node
        bandwidth = min(bandwidth, self.adapters / max(1.0, single))
        return size / bandwidth + self.far + again
