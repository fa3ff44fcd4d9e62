"""Bandwidth by level, and who is to blame for what is slow. Every rank computes the same result.

1. *Within the node*: point-to-point between its ranks, all-reduce and all-gather over them, on all nodes at once.
2. *Between nodes*: pairs of nodes, disjoint ones at the same time (``pairs.rounds_for``: every pair up to 16
   nodes, beyond that 2 log2(n) rounds). Rank i of one node talks to rank i of the other, all i together, so
   that every network adapter works. What looks slow is then measured again, alone, up to four times, and its
   fastest message counts: only what is slow even then is blamed.
3. *All ranks*: all-reduce and all-gather.
4. *Groups*: as many communicators across nodes as the run opens (``preflight.network``).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_port.core.config.checks import problems, resolve
from megatron_port.core.config.schema import PreflightConfig, RunConfig
from megatron_port.core.dist.groups import planned
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.errors import EnvironmentFault
from megatron_port.run.rendezvous import within
from megatron_port.tools.preflight.core import ALL_GATHER, ALL_REDUCE, algbw_gb, busbw_gb
from megatron_port.tools.preflight.exchange import (
    ALL_PAIRS_UP_TO,
    Culprits,
    Pair,
    RankPlacement,
    all_pairs_rounds,
    both_ways,
    collective_seconds,
    identify,
    largest,
    meet,
    neighbour_rounds,
    open_group,
    rounds_for,
    sacrifice,
    suspects,
    synchronize,
)
from megatron_port.tools.preflight.verdict import upper_median

# Communicators across nodes, as many as the run will open.
#
# A fabric can carry the default group and hang at the next: on MI250X nodes with Slingshot, the first collective of a
# second group blocked on every rank in 13 of 17 attempts (laifs-container-recipes #44), while a job with one group
# passed each time. The check opens as many as training does, so that a job with tensor or pipeline parallelism does not
# find out after its queue time.

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
        two_way: the backend needs a second queue between stages (``nccl``; see ``dist.groups.planned``).

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


ATTEMPTS = 4
"""Second looks at what is slow, before it is blamed."""
CLEAR = 0.1
"""Share of the expected rate below which a second measurement is final."""
MOST_SUSPECT_NODES = 16
"""Nodes whose inner bandwidth is measured a second time."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of messages and collectives, bytes."""

    small: int
    large: int
    """Size of the collectives, bytes."""
    message: int
    """Between two ranks."""


def default_sizes(device: torch.device, message: int = 0) -> Sizes:
    """Return sizes that fill a GPU's links, or small enough for a CPU's slow one. ``message``: replaces the last."""
    if device.type == "cuda":
        return Sizes(1 << 20, 256 << 20, message or 64 << 20)
    return Sizes(64 << 10, 2 << 20, message or 1 << 20)


@dataclass(frozen=True)
class Collective:
    """Row of the table."""

    level: str
    """node: the ranks of one node, all nodes at once, median over them | all: every rank"""
    operation: str
    size: int
    ranks: int
    seconds: float
    algbw_gb: float
    busbw_gb: float
    slowest: str = ""
    """Level node: the slowest node,"""
    slowest_busbw_gb: float = 0.0
    """and its busbw."""


@dataclass(frozen=True)
class Blame:
    """Blame for something slow."""

    kind: str
    """node (all its links) | link | inside (a node) | all (no culprit)"""
    hosts: tuple[str, ...]
    measured_gb: float
    expected_gb: float
    text: str
    fix: str

    def __str__(self) -> str:
        return f"{self.text}; {self.fix}"


@dataclass
class NetworkResult:
    """Result of the check, equal on all ranks."""

    place: RankPlacement
    sizes: Sizes
    collectives: list[Collective] = field(default_factory=list)
    local: list[dict[str, Any]] = field(default_factory=list)
    """Ranks i and j of one node: ``lanes``, ``median_gb`` over the nodes, ``slowest_gb``, ``slowest``."""
    lanes: list[dict[Pair, float]] = field(default_factory=list)
    """For each local rank: pair of nodes → GB/s in the slower direction."""
    rounds: int = 0
    remeasured: int = 0
    """Pairs measured twice."""
    groups: int = 0
    """Communicators across nodes that were opened beside the default group, as the run will;"""
    groups_seconds: float = 0.0
    """and how long that took, on the slowest rank."""
    blames: list[Blame] = field(default_factory=list)
    bad: dict[str, str] = field(default_factory=dict)
    """Host to leave out → why."""
    faults: list[str] = field(default_factory=list)
    """Faults of the whole job; leaving nodes out does not help."""

    @property
    def totals(self) -> dict[Pair, float]:
        """Return pair of nodes → GB/s over all its lanes together."""
        return {p: sum(lane[p] for lane in self.lanes) for p in self.lanes[0]} if self.lanes else {}

    def as_json(self) -> dict[str, Any]:
        """Return the result for network.json."""
        hosts, totals = self.place.hosts, self.totals
        return {
            "ranks": len(self.place.node_of), "nodes": hosts, "device": self.place.device.type,
            "sizes": asdict(self.sizes), "collectives": [asdict(c) for c in self.collectives], "local": self.local,
            "links": {
                "rounds": self.rounds, "remeasured": self.remeasured, "median_gb": upper_median(totals.values()),
                "pairs": [{"hosts": [hosts[p[0]], hosts[p[1]]], "gb": r, "lanes_gb": [lane[p] for lane in self.lanes]}
                          for p, r in sorted(totals.items())],
            },
            "groups": {"across_nodes": self.groups, "seconds": self.groups_seconds},
            "findings": [{**asdict(b), "hosts": list(b.hosts)} for b in self.blames], "bad": self.bad,
            "faults": self.faults,
        }


def check_network(
    place: RankPlacement, limits: PreflightConfig, sizes: Sizes, *, groups: int = 0, timeout_s: float = 120.0
) -> NetworkResult:
    """Check the network. Collective over all ranks.

    Args:
        groups: communicators across nodes to open beside the default group (``preflight.network``).
        timeout_s: seconds that each of them may take.

    Raises:
        EnvironmentFault: a message or a collective failed or timed out; the message names the two hosts, where
            there are two.
    """
    result = NetworkResult(place, sizes)
    _guard("the first all-reduce over all ranks", lambda: open_group(place.device))
    if place.lanes > 1:
        result.local = local_pairs(place, sizes.message)
        within_nodes(result, limits)
    if len(place.hosts) > 1:
        between_nodes(result, limits)
    world = len(place.node_of)
    for operation in (ALL_REDUCE, ALL_GATHER) if world > 1 else ():
        for size in (sizes.small, sizes.large):
            seconds = _guard(
                f"{operation} of {size} bytes over all ranks", partial(collective_seconds, operation, size, place))
            result.collectives.append(Collective(
                "all", operation, size, world, seconds, algbw_gb(size, seconds),
                busbw_gb(operation, size, seconds, world)))
    if groups and len(place.hosts) > 1:
        seconds = open_groups(place, groups, timeout_s)
        result.groups, result.groups_seconds = groups, _guard(
            "the exchange of how long the groups took", lambda: largest([seconds])[0])
    _judge_world(result, limits)
    return result


def _guard(what: str, call: Callable[[], Any]) -> Any:
    """Turn a failed collective into a fault that says which."""
    try:
        return call()
    except RuntimeError as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise EnvironmentFault(f"{what} failed: {lines[0][:300]}") from None


def sweep(
    place: RankPlacement, rounds: int, partner: Callable[[int], int | None], message: int, *, patient: bool = False
) -> torch.Tensor:
    """Return GB/s of each rank towards its partner of each round, ``[rounds, ranks]``; 0 without a partner."""
    table = torch.zeros(rounds, len(place.node_of), dtype=torch.float64)
    buffer = torch.zeros(message, dtype=torch.uint8, device=place.device)
    for i in range(rounds):
        _guard("an all-reduce of one number between two rounds of the sweep", meet)
        peer = partner(i)
        if peer is not None:
            own, other = (place.hosts[place.node_of[r]] for r in (place.rank, peer))
            what = f"a message between {own} (rank {place.rank}) and {other} (rank {peer})"
            table[i, place.rank] = _guard(what, partial(both_ways, peer, place.rank, buffer, patient=patient))
    _guard("the exchange of the sweep's results", lambda: dist.all_reduce(table))
    return table


def _node_partner(place: RankPlacement, pairs: list[Pair]) -> int | None:
    """Return the rank with this rank's lane on the node that its own is paired with."""
    if place.lane >= place.lanes:
        return None
    other = next((b if a == place.node else a for a, b in pairs if place.node in (a, b)), None)
    return None if other is None else place.members[other][place.lane]


def node_pairs(
    place: RankPlacement, rounds: list[list[Pair]], message: int, *, patient: bool = False
) -> list[dict[Pair, float]]:
    """Return for each lane: pair of nodes → GB/s in the slower direction. Collective."""
    table = sweep(place, len(rounds), lambda i: _node_partner(place, rounds[i]), message, patient=patient).tolist()
    ranks = place.members
    return [
        {(a, b): min(table[i][ranks[a][lane]], table[i][ranks[b][lane]])
         for i, pairs in enumerate(rounds) for a, b in pairs}
        for lane in range(place.lanes)
    ]


def local_pairs(place: RankPlacement, message: int) -> list[dict[str, Any]]:
    """Measure between the ranks of each node, all nodes at once. Lanes 2k and 2k + 1 are one package on MI250X."""
    rounds = all_pairs_rounds(place.lanes) if place.lanes <= ALL_PAIRS_UP_TO else neighbour_rounds(place.lanes)
    own = place.members[place.node]

    def partner(i: int) -> int | None:
        other = next((b if a == place.lane else a for a, b in rounds[i] if place.lane in (a, b)), None)
        return None if other is None else own[other]

    table = sweep(place, len(rounds), partner, message).tolist()
    out = []
    for i, pairs in enumerate(rounds):
        for a, b in pairs:
            rates = {}
            for node, host in enumerate(place.hosts):
                ranks = place.members[node]
                rates[host] = min(table[i][ranks[a]], table[i][ranks[b]])
            slowest = min(rates, key=lambda h: rates[h])
            out.append({"lanes": [a, b], "median_gb": upper_median(rates.values()), "slowest_gb": rates[slowest],
                        "slowest": slowest})
    return sorted(out, key=lambda row: row["lanes"])


def within_nodes(result: NetworkResult, limits: PreflightConfig) -> None:
    """Measure all-reduce and all-gather over the ranks of each node; slow nodes once more, one after another."""
    place, own = result.place, result.place.members[result.place.node]
    # Only the node's own ranks take part in making its group: one per rank, however many nodes. It ends with the
    # default group; torch would give its name, and the addresses of its ranks, to the next one over the same ranks.
    group = dist.new_group(own, use_local_synchronization=True)

    def measure(operation: str, size: int, nodes: list[int]) -> list[float]:
        """Return seconds by node; 0 for those that rest."""
        seconds = torch.zeros(len(place.hosts), dtype=torch.float64)
        what = f"{operation} of {size} bytes within {place.hosts[place.node]}"
        if place.node in nodes:
            value = _guard(what, lambda: collective_seconds(operation, size, place, group))
            if place.lane == 0:
                seconds[place.node] = value
        _guard("the exchange of results within the nodes", lambda: dist.all_reduce(seconds))
        return [float(s) for s in seconds.tolist()]

    every = list(range(len(place.hosts)))
    for operation in (ALL_REDUCE, ALL_GATHER):
        for size in (result.sizes.small, result.sizes.large):
            seconds = measure(operation, size, every)
            rates = [busbw_gb(operation, size, s, len(place.members[n])) for n, s in enumerate(seconds)]
            if operation == ALL_REDUCE and size == result.sizes.large:
                rates = _confirm_inside(result, limits, rates, partial(measure, ALL_REDUCE, result.sizes.large))
            slowest = min(every, key=lambda n: rates[n])
            middle = statistics.median(seconds)
            result.collectives.append(Collective(
                "node", operation, size, place.lanes, middle, algbw_gb(size, middle), upper_median(rates),
                place.hosts[slowest], rates[slowest]))


def _confirm_inside(result: NetworkResult, limits: PreflightConfig, rates: list[float],
                    again: Callable[[list[int]], list[float]]) -> list[float]:
    """Measure slow nodes alone; what stays slow is blamed. Return the better rate of each node."""
    place, rates = result.place, list(rates)
    expected = max(limits.node_busbw_gb, limits.share_of_median * upper_median(rates))
    slow = sorted((n for n, r in enumerate(rates) if r < expected), key=lambda n: rates[n])[:MOST_SUSPECT_NODES]
    for node in slow:
        for _ in range(ATTEMPTS):
            seconds = again([node])[node]
            rates[node] = max(rates[node], busbw_gb(ALL_REDUCE, result.sizes.large, seconds, len(place.members[node])))
            if rates[node] >= expected:
                break
        if rates[node] >= expected:
            continue
        host = place.hosts[node]
        blame = Blame(
            "inside", (host,), rates[node], expected,
            f"all-reduce within {host} reaches {rates[node]:.4g} GB/s busbw, at least {expected:.4g} expected",
            "check the links between its devices (rocm-smi --showtopo, nvidia-smi nvlink -s) and drain it")
        result.blames.append(blame)
        result.bad[host] = blame.text
    return rates


def blame_lanes(
    lanes: list[dict[Pair, float]], limits: PreflightConfig, *, own_adapters: bool = True
) -> list[tuple[int | None, Culprits]]:
    """Return the culprits by the nodes' total rates (lane None), then those that only one lane shows.

    ``own_adapters``: whether a lane has an adapter that the others do not use, as a GPU has. The ranks of a CPU
    run share the node's one interface and its cores: what one of them reaches says nothing about a link.
    """
    totals = {p: sum(lane[p] for lane in lanes) for p in lanes[0]}
    whole = identify(totals, share=limits.share_of_median, floor=limits.link_gb)
    found: list[tuple[int | None, Culprits]] = [(None, whole)]
    for i, rates in enumerate(lanes if own_adapters and len(lanes) > 1 else []):
        part = identify(rates, share=limits.share_of_median)
        nodes = {n: v for n, v in part.nodes.items() if n not in whole.nodes}
        links = {p: v for p, v in part.links.items() if p not in whole.links and not whole.nodes.keys() & set(p)}
        found.append((i, Culprits(nodes, links)))
    return [(i, c) for i, c in found if c]


def between_nodes(result: NetworkResult, limits: PreflightConfig) -> None:
    """Sweep over pairs of nodes, measure again what is slow, and blame."""
    place, message = result.place, result.sizes.message
    rounds = rounds_for(len(place.hosts))
    result.lanes, result.rounds = node_pairs(place, rounds, message), len(rounds)
    remeasured: set[Pair] = set()
    own_adapters = place.device.type == "cuda"
    for _ in range(ATTEMPTS):
        doubtful: set[Pair] = set()
        for lane, culprits in blame_lanes(result.lanes, limits, own_adapters=own_adapters):
            rates = result.totals if lane is None else result.lanes[lane]
            doubtful.update(suspects(rates, culprits, seen=remeasured, clear=CLEAR))
        if not doubtful:
            break
        again = node_pairs(place, [[p] for p in sorted(doubtful)], message, patient=True)
        for known, found in zip(result.lanes, again):
            known.update({p: max(known[p], r) for p, r in found.items()})
        remeasured |= doubtful
    result.remeasured = len(remeasured)
    for lane, culprits in blame_lanes(result.lanes, limits, own_adapters=own_adapters):
        culprits.links = {p: v for p, v in culprits.links.items() if p in remeasured}  # nothing unconfirmed
        _name(result, lane, culprits)


def _name(result: NetworkResult, lane: int | None, culprits: Culprits) -> None:
    """Add the blames for some culprits, and the hosts to leave out."""
    hosts = result.place.hosts
    rates = result.totals if lane is None else result.lanes[lane]
    by = "" if lane is None else f" (local rank {lane} only)"
    for node, (measured, expected) in culprits.nodes.items():
        blame = Blame(
            "node", (hosts[node],), measured, expected,
            f"{hosts[node]} is slow with every node{by}: {measured:.4g} GB/s, at least {expected:.4g} expected",
            "check its network adapters (state, speed, errors) and drain it")
        result.blames.append(blame)
        result.bad.setdefault(hosts[node], blame.text)
    leave = sacrifice(culprits.links, rates)
    for (a, b), (measured, expected) in culprits.links.items():
        out = ", ".join(hosts[n] for n in (a, b) if n in leave)
        blame = Blame(
            "link", (hosts[a], hosts[b]), measured, expected,
            f"the link {hosts[a]} - {hosts[b]} is slow{by}: {measured:.4g} GB/s, at least {expected:.4g} expected",
            f"have the cables and switches between them checked; {out} is left out, for its pairs with others are "
            f"no faster" if out else "have the cables and switches between them checked")
        result.blames.append(blame)
        for node in (a, b):
            if node in leave:
                result.bad.setdefault(hosts[node], blame.text)


def _judge_world(result: NetworkResult, limits: PreflightConfig) -> None:
    """Judge the all-reduce over everyone: low without a culprit is the job's fault, not a node's."""
    row = next((c for c in result.collectives if c.level == "all" and c.operation == ALL_REDUCE
                and c.size == result.sizes.large), None)
    if row is None or len(result.place.hosts) < 2 or row.busbw_gb >= limits.network_busbw_gb or result.blames:
        return
    blame = Blame(
        "all", (), row.busbw_gb, limits.network_busbw_gb,
        f"all-reduce over all {row.ranks} ranks reaches {row.busbw_gb:.4g} GB/s busbw, at least "
        f"{limits.network_busbw_gb:.4g} expected, and no node or link stands out",
        "look at the network library, its interfaces and settings (the lines above), then at congestion by other jobs")
    result.blames.append(blame)
    result.faults.append(str(blame))


def render(result: NetworkResult) -> str:
    """Return the tables, then what was found."""
    place, totals = result.place, result.totals
    lines = [f"{len(place.node_of)} ranks on {len(place.hosts)} nodes, {place.device.type}; GB/s = 10^9 bytes/s; "
             "busbw as in nccl-tests and rccl-tests",
             f"{'level':<6} {'operation':<12} {'bytes':>11} {'ranks':>6} {'time ms':>10} {'algbw':>9} {'busbw':>9}"]
    for c in result.collectives:
        tail = f"  slowest {c.slowest} {c.slowest_busbw_gb:.4g}" if c.slowest and len(place.hosts) > 1 else ""
        lines.append(f"{c.level:<6} {c.operation:<12} {c.size:>11} {c.ranks:>6} {c.seconds * 1e3:>10.3f} "
                     f"{c.algbw_gb:>9.4g} {c.busbw_gb:>9.4g}{tail}")
    for row in result.local:
        lines.append(f"node   local ranks {row['lanes'][0]} - {row['lanes'][1]}: {row['median_gb']:.4g} GB/s"
                     + (f", slowest {row['slowest']} {row['slowest_gb']:.4g}" if len(place.hosts) > 1 else ""))
    if totals:
        low = min(totals, key=lambda p: totals[p])
        middle = upper_median(totals.values())
        lines.append(f"pairs  {len(totals)} of nodes in {result.rounds} rounds: median {middle:.4g} GB/s, slowest"
                     f" {place.hosts[low[0]]} - {place.hosts[low[1]]} {totals[low]:.4g}"
                     + (f"; {result.remeasured} measured again, alone" if result.remeasured else ""))
    if result.groups:
        lines.append(f"groups {result.groups} across nodes beside the default one, as many as the run opens: "
                     f"made and used in {result.groups_seconds:.3g} s")
    lines += [f"bad: {b}" for b in result.blames]
    if not result.blames:
        lines.append("no slow node and no slow link")
    return "\n".join(lines)
