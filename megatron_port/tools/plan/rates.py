"""Seconds on a machine: products and passes over memory, collectives and messages, and their sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_port.core.errors import ConfigError
from megatron_port.tools.plan.case import Case, KernelTable, Machine

# How long one kernel takes: products by shape, streaming by bytes, fused attention by operations.
#
# A product of [rows, inner] by [inner, columns] runs as output tiles, one a compute unit
# at a time. Three losses are counted, each with a physical cause:
#
# * waves: ceil(tiles / units) rounds of tiles run, the last one partly empty, and edge tiles are padded;
# * filling and emptying a tile's pipeline: inner / (inner + fill);
# * smaller tiles, which a library takes where they waste less, read more for each operation:
#   (1/rows + 1/columns) of the large tile over that of the small one bounds their rate, softened by the cache.
#
# The time is the larger of that and of the operands' bytes at the achieved memory bandwidth (roofline). Where a block
# computes one tile and ends (before Hopper), nothing is multiplied while tiles are written: reading hides behind the
# arithmetic, but writing comes on top where it takes longer than a tile's pipeline to fill. It is what an attention
# product of 64 to 128 inner steps mostly does.
BLOCK = 128
"""Positions of a block of a fused attention kernel (FlashAttention-2: 128 x 64 or 128 x 128)."""
LENGTH = 2048
"""Positions that a cluster's attention rates are of."""
CACHE_SHARE = 0.75
"""Share of a small tile's additional reads that the L2 cache and the overlap with arithmetic hide (unverified)."""


CORE_INNER = 64
"""Rows, columns and inner dimension of the products that stand for the core of a mixer without a rate of its own."""


@dataclass(frozen=True)
class Rates:
    """Rates that one device of a cluster achieves, after calibration: FLOP/s, bytes/s, seconds."""

    matmul: float
    fp8: float
    units: int
    tile: tuple[int, int]
    fill: int
    attention_forward: float
    attention_backward: float
    launch: float
    memory: float
    epilogue_overlap: bool = False
    """A tile is written while the next one is multiplied."""
    fp8_exact: float = 0.0
    """``fp8`` where sums are kept in fp32."""
    fp32: float = 0.0
    """0: a quarter of ``matmul``."""
    attention_scale: float = 1.0
    host: float = 0.0
    """Seconds of the host for one operation; 0: not known."""
    table: KernelTable | None = None
    """Measured operations, used instead of or beside the formulas."""

    @classmethod
    def of(cls, machine: Machine) -> Rates:
        """Rates of a machine's device."""
        h, k, table = machine.hardware, machine.calibration, machine.table
        host = _seconds_of_a(table, "host")
        return cls(
            matmul=h.matmul_tflops * 1e12 * k.matmul_scale, fp8=h.fp8_matmul_tflops * 1e12 * k.matmul_scale,
            fp8_exact=h.fp8_matmul_tflops * 1e12 * k.matmul_scale * h.fp8_exact_share,
            units=h.compute_units, tile=(h.tile_rows, h.tile_columns), fill=h.inner_fill,
            attention_forward=h.attention_forward_tflops * 1e12,
            attention_backward=h.attention_backward_tflops * 1e12,
            launch=h.launch_us * 1e-6, epilogue_overlap=h.epilogue_overlap,
            memory=h.memory_bandwidth_gb * 1e9 * h.memory_efficiency * k.memory_scale,
            fp32=h.fp32_matmul_tflops * 1e12 * k.matmul_scale, host=host or h.host_us * 1e-6,
            attention_scale=k.attention_scale, table=table,
        )

    @property
    def host_recompute(self) -> float:
        """Seconds of the host for running a layer's forward pass again; 0: not known."""
        return _seconds_of_a(self.table, "host-recompute")

    @property
    def host_micro_batch(self) -> float:
        """Seconds of the host for a micro-batch beyond its layers: embedding, head, loss, schedule; 0: not known."""
        return _seconds_of_a(self.table, "host-micro-batch")

    @property
    def host_step(self) -> float:
        """Seconds of the host for a step beyond its micro-batches; 0: not known."""
        return _seconds_of_a(self.table, "host-step")

    def attention(self, provider: str, length: float, head: float) -> tuple[float, float]:
        """FLOP/s of fused attention's forward and backward over the operations of the causal half.

        From the table, by the provider's own curve. Else the cluster's one number, which is of ``LENGTH`` positions,
        by how much of the blocks of ``BLOCK`` positions on the diagonal is masked.
        """
        if self.table is not None:
            forward = self.table.curve("attention-forward", provider, "", length, head)
            backward = self.table.curve("attention-backward", provider, "", length, head)
            if forward and backward:
                return forward * 1e12 * self.attention_scale, backward * 1e12 * self.attention_scale
        shape = self.attention_scale * (1 + BLOCK / LENGTH) / (1 + BLOCK / max(length, 1.0))
        return self.attention_forward * shape, self.attention_backward * shape

    def attention_here(self, dtype: str, length: float, head: float) -> tuple[float, float] | None:
        """FLOP/s of the attention that the program takes on this machine, as it was measured; None: it was not."""
        if self.table is None or not self.table.has("attention-forward", "here", dtype):
            return None
        forward, backward = (
            self.table.curve(f"attention-{way}", "here", dtype, length, head) for way in ("forward", "backward")
        )
        return None if not forward or not backward else (forward * 1e12, backward * 1e12)

    def stream(self, size: float, kernels: int = 1) -> float:
        """Seconds to move ``size`` bytes in ``kernels`` kernels."""
        return size / self.memory + kernels * self.launch

    def dropout(self, elements: float, width: int) -> float:
        """Seconds to draw a mask for so many elements and apply it, ``width`` bytes moved for each: random numbers take
        longer than the bytes where the table has their rate."""
        found = self.table.group("dropout") if self.table is not None else []
        return max(self.stream(elements * width), elements / (found[0].rate * 1e9) if found else 0.0)

    def measured(self, op: str, dtype: str) -> bool:
        """Whether the table has an op's rate."""
        return self.table is not None and bool(self.table.group(op, "", dtype))

    def passes(self, sizes: Mapping[str, float], kernels: int, dtype: str) -> float:
        """Seconds of passes over memory, op → bytes: at its own rate where that was measured, else at a copy's."""
        seconds, unknown = 0.0, 0.0
        for op, size in sizes.items():
            rate = None if self.table is None else self.table.rate(op, dtype, size)
            if rate is None:
                unknown += size
            else:
                seconds += size / (rate * 1e9)
        return seconds + self.stream(unknown, kernels)

    def adds_gradient(self, width: int) -> bool:
        """Whether the measured products of weights' gradients add them to their sums."""
        return self.table is not None and self.table.has("product-weight", "", DTYPES.get(width, ""))

    def product(
        self, rows: float, columns: float, inner: float, *, width: int = 2, batch: float = 1, exact: bool = False,
        op: str = "product",
    ) -> float:
        """Seconds of ``batch`` products [rows, inner] x [inner, columns]; ``width``: bytes of an element (1: fp8).

        ``exact``: fp8 sums are kept in fp32, as those of gradients are, which slows some devices. ``op``: which of a
        linear layer's, product | product-input | product-weight, where they were measured apart.
        """
        peak = (self.fp8_exact if exact else self.fp8) if width == 1 else 0.0
        return _product(self, math.ceil(rows), math.ceil(columns), math.ceil(inner), width, batch, peak, op)

    def core(self, operations: float, width: int) -> tuple[float, float]:
        """Estimate the seconds of the forward and the backward pass of so many operations between projections that are
        no attention, as square products of ``CORE_INNER``."""
        each = self.product(CORE_INNER, CORE_INNER, CORE_INNER, width=width, batch=operations / (2 * CORE_INNER**3))
        return each, 2 * each


def efficiency(rates: Rates, rows: int, columns: int, inner: int, batch: float = 1) -> float:
    """Share of the device's best matmul rate that this shape allows, over the best of the library's tiles."""
    large = rates.tile
    best = 0.0
    for shrink_rows, shrink_columns in ((1, 1), (2, 1), (1, 2), (2, 2), (4, 2)):
        r, c = max(large[0] // shrink_rows, 32), max(large[1] // shrink_columns, 32)
        for a, b in ((r, c), (c, r)):
            tiles = math.ceil(rows / a) * math.ceil(columns / b) * batch
            whole = rows * columns * batch / (a * b)
            waves = math.ceil(tiles / rates.units)
            reads = (1 / large[0] + 1 / large[1]) / (1 / a + 1 / b)
            rate = reads + (1 - reads) * CACHE_SHARE
            if rates.epilogue_overlap:
                steps = waves * inner
                rate *= steps / (steps + rates.fill * large[0] * large[1] / (a * b))
            best = max(best, whole / (waves * rates.units) * rate)
    return best if rates.epilogue_overlap else best * inner / (inner + rates.fill)


@lru_cache(maxsize=65536)
def _product(
    rates: Rates, rows: int, columns: int, inner: int, width: int, batch: float, fp8: float, op: str
) -> float:
    if not rows or not columns or not inner:
        return 0.0
    ratio = _measured(rates, rows, columns, inner, width, op) if rates.table is not None and batch == 1 else 1.0
    return _analytic(rates, rows, columns, inner, width, batch, fp8) / ratio


DTYPES = {1: "fp8", 2: "bf16", 4: "fp32"}


def _seconds_of_a(table: KernelTable | None, op: str) -> float:
    """Seconds of one call of an op whose rate is in 10^6 a second; 0: not measured."""
    rate = None if table is None else table.rate(op, "", 1.0)
    return 1e-6 / rate if rate else 0.0


def _measured(rates: Rates, rows: int, columns: int, inner: int, width: int, op: str) -> float:
    """Measured over planned rate of a product; 1 where the table has nothing near."""
    def formula(shape: tuple[float, ...]) -> float:
        r, c, k = (int(x) for x in shape)
        return 2.0 * r * c * k / _analytic(rates, r, c, k, width, 1, rates.fp8) / 1e12

    assert rates.table is not None
    dtype = DTYPES.get(width, "")
    op = op if rates.table.has(op, "", dtype) else "product"
    return rates.table.ratio(op, "", dtype, (rows, columns, inner), formula) or 1.0


def _analytic(rates: Rates, rows: int, columns: int, inner: int, width: int, batch: float, fp8: float) -> float:
    peak = fp8 if width == 1 else rates.matmul
    if width >= 4:  # no 16-bit tensor rate: fp32 a quarter of it, roughly, and fp64 half of that
        peak = (rates.fp32 or rates.matmul / 4) / (width // 4)
    flops = 2.0 * rows * columns * inner * batch
    read, written = batch * width * (rows * inner + inner * columns), batch * max(width, 2) * rows * columns
    share = efficiency(rates, rows, columns, inner, batch)
    if rates.epilogue_overlap or not rates.fill:
        return max(flops / (peak * share), (read + written) / rates.memory) + rates.launch
    multiplied = flops / (peak * share) * inner / (inner + rates.fill)  # without filling a tile's pipeline
    filled = multiplied * rates.fill / inner
    return max(multiplied, read / rates.memory) + max(filled, written / rates.memory) + rates.launch


# How long a collective or a transfer takes on the levels of a cluster: package, node, network, group of nodes.
#
# Ranks are placed tensor parallel innermost, then data (and context) parallel, then pipeline, as ``dist.mesh`` does.
# A ring over r ranks moves 2(r−1)/r of the buffer past each rank for an all-reduce, half of that for a reduce-scatter
# or an all-gather, in as many hops. Where a group spans nodes, its ranks on one node share the node's adapters with
# the other groups of that node, and the slowest level bounds the ring. An all-reduce takes a tree (2·log2 of the
# nodes hops) where its latency is less; for reduce-scatters and all-gathers NCCL and RCCL have rings alone
# (``src/graph/tuning.cc``; arXiv 2504.18658). Within a node, where the cluster's table has measured collectives by
# ranks and bytes, these seconds are times the ratio that was measured: short rings and small buffers fill links less.
#
# Out of a group of the network (a dragonfly's, a pod) goes what ranks send beyond its nodes while all groups of ranks
# do the same. The neighbours of rings and transfers are d nodes apart, so the last d nodes of each group of g send
# out, d / g of all of them; an all-to-all over n nodes sends 1 − g / n. The links have ``group_taper`` of the
# bandwidth of the adapters, on a dragonfly half of that: traffic between two groups takes a detour (Kim et al., ISCA
# 2008). Where flows are hashed onto ``group_uplinks`` links instead of spread over them, some share one while others
# are idle. A ring runs at the pace of the busiest link, an all-to-all at their mean: Hoefler et al. (CLUSTER 2008)
# measured 55 to 60 % of the rated bisection so, where 1 - 1/e of the links have a flow. With ``rails`` a switch has
# one adapter of each node, and a ring that changes its adapter within a node sends all of its traffic over those
# links. NCCL closes such rings through another device from 2.12 on (PXN; NVIDIA/nccl issue 2193).

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


# Seconds of a pass through part of a model, by cause.

@dataclass(frozen=True)
class Cost:
    """Seconds of a forward and of a backward: arithmetic and memory apart from communication within a stage."""

    forward: float = 0.0
    backward: float = 0.0
    """With what recompute adds."""
    forward_tensor: float = 0.0
    """The part of tensor-parallel collectives that compute does not hide."""
    backward_tensor: float = 0.0
    forward_exchange: float = 0.0
    """The part of all-to-all between expert-parallel ranks that compute does not hide."""
    backward_exchange: float = 0.0
    forward_context: float = 0.0
    """The part of context-parallel exchanges that compute does not hide."""
    backward_context: float = 0.0
    fillable: float = 0.0
    """The part of ``forward_exchange`` with rows on their way, beside which weight passes may run."""
    forward_starts: float = 0.0
    """Seconds in which the host starts the operations of the forward pass."""
    backward_starts: float = 0.0
    forward_host: float = 0.0
    """Seconds that the forward pass waits for the host: see :meth:`with_host`."""
    backward_host: float = 0.0

    @property
    def parts(self) -> tuple[float, ...]:
        """All of them."""
        return (
            self.forward, self.backward, self.forward_tensor, self.backward_tensor, self.forward_exchange,
            self.backward_exchange, self.forward_context, self.backward_context, self.fillable,
            self.forward_starts, self.backward_starts, self.forward_host, self.backward_host,
        )

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(mine + theirs for mine, theirs in zip(self.parts, other.parts)))

    def times(self, count: float) -> Cost:
        """Return the cost ``count`` times."""
        return Cost(*(seconds * count for seconds in self.parts))

    @property
    def forward_alone(self) -> Cost:
        """This forward pass without a backward one."""
        return Cost(
            forward=self.forward, forward_tensor=self.forward_tensor, forward_exchange=self.forward_exchange,
            forward_context=self.forward_context, forward_starts=self.forward_starts, forward_host=self.forward_host,
        )

    @property
    def passes(self) -> tuple[float, float]:
        """Seconds of a forward and of a backward pass, communication included."""
        return (
            self.forward + self.forward_tensor + self.forward_exchange + self.forward_context + self.forward_host,
            self.backward + self.backward_tensor + self.backward_exchange + self.backward_context + self.backward_host,
        )

    def with_host(self, *, is_device: bool = False) -> Cost:
        """This pass no faster than the host starts it: the host runs ahead within a pass, so whole passes are compared.

        ``is_device``: the host computes as well, and starting operations adds to that.
        """
        if is_device:
            return replace(self, forward_host=self.forward_starts, backward_host=self.backward_starts)
        forward, backward = self.passes
        return replace(
            self, forward_host=max(self.forward_starts - forward, 0.0),
            backward_host=max(self.backward_starts - backward, 0.0),
        )
