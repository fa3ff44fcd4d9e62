"""Timed messages between ranks, on the default group.

No group per pair is made: every message is a ``batch_isend_irecv`` on the default group. Gloo has a
connection to each peer anyway. For NCCL and RCCL torch serves a batch by the group's own
communicator (a plain ``isend`` would make one for each pair, when first used) provided a collective
has run on the group before, which :func:`open_group` sees to; inside it the library connects two
ranks when they first exchange something, hence the warm-up. One task, one thread: a rank is in at
most one exchange at a time.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import gcd

import torch
import torch.distributed as dist

from megatron_port.core.dist.agree import gather_names
from megatron_port.core.dist.collectives import all_gather_single
from megatron_port.tools.preflight.core import ALL_GATHER, ALL_REDUCE, SIZE, CoreRate, measure_core
from megatron_port.tools.preflight.verdict import upper_median

PAIR_BUDGET_S = 0.1
"""A sender takes no further sample of a pair when the samples have taken this long;"""
PATIENT_BUDGET_S = 0.4
"""or this long, when the fastest one counts (a second look at what is slow);"""
SAMPLES = 20
"""nor more than these, or twice as many."""
COLLECTIVE_BUDGET_S = 1.0


@dataclass(frozen=True)
class RankPlacement:
    """Placement of the ranks on nodes, as one rank sees it."""

    rank: int
    hosts: list[str]
    """Names of the nodes, in the order of their lowest rank."""
    node_of: list[int]
    """Rank → node."""
    members: list[list[int]]
    """Node → its ranks, rising; the position of a rank in it is its lane."""
    device: torch.device
    """Device of the messages."""

    @property
    def node(self) -> int:
        """Index of this rank's node."""
        return self.node_of[self.rank]

    @property
    def lanes(self) -> int:
        """Ranks that every node has at least."""
        return min(len(ranks) for ranks in self.members)

    @property
    def lane(self) -> int:
        """This rank's position on its node."""
        return self.members[self.node].index(self.rank)


def synchronize(device: torch.device) -> None:
    """Wait for a GPU's queue; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def meet() -> None:
    """Meet all ranks on the CPU: an all-reduce of one number over gloo."""
    dist.all_reduce(torch.zeros(1))


def largest(values: list[float], group: dist.ProcessGroup | None = None) -> list[float]:
    """Return the elementwise maximum over the ranks of ``group`` (None: all)."""
    t = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(t, op=dist.ReduceOp.MAX, group=group)
    return [float(v) for v in t.tolist()]


def gather_place(host: str, device: torch.device) -> RankPlacement:
    """Return this rank's :class:`RankPlacement` from every rank's host name (cut at 128 bytes). Collective."""
    names = gather_names(host)
    members: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        members.setdefault(name, []).append(rank)
    number = {name: node for node, name in enumerate(members)}
    return RankPlacement(dist.get_rank(), list(members), [number[n] for n in names], list(members.values()), device)


def open_group(device: torch.device) -> None:
    """Make the default group's communicator for this device, over all ranks. Collective."""
    dist.all_reduce(torch.zeros(1, device=device))
    synchronize(device)


def _pass(tensor: torch.Tensor, peer: int, *, send: bool) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend if send else dist.irecv, tensor, peer)]):
        work.wait()


def one_way(peer: int, buffer: torch.Tensor, *, send: bool, patient: bool = False) -> list[float]:
    """Time messages of the size of ``buffer`` to or from ``peer``, which calls this with ``send`` reversed.

    Each message: sender announces it, receiver says it is ready, then the clock starts; it stops when
    the receiver's word has come that all is there. So the time includes one short message back, and
    never the wait for a peer that is late. A message of an eighth goes first, to connect.

    Returns:
        Seconds of each sample on the sender, at least one; nothing on the receiver.
    """
    word = torch.zeros(1, dtype=torch.int64, device=buffer.device)
    samples: list[float] = []
    if not send:
        while True:
            _pass(word, peer, send=False)
            size = int(word.item())
            if size == 0:
                return []
            _pass(word, peer, send=True)
            _pass(buffer[:size], peer, send=False)
            _pass(word, peer, send=True)
            synchronize(buffer.device)
    for size in [max(1, buffer.numel() // 8)] + [buffer.numel()] * (2 * SAMPLES if patient else SAMPLES):
        if sum(samples) > (PATIENT_BUDGET_S if patient else PAIR_BUDGET_S):
            break
        word.fill_(size)
        _pass(word, peer, send=True)
        _pass(word, peer, send=False)
        synchronize(buffer.device)
        begin = time.perf_counter()
        _pass(buffer[:size], peer, send=True)
        _pass(word, peer, send=False)
        synchronize(buffer.device)
        samples.append(time.perf_counter() - begin)
        if len(samples) == 1 and size < buffer.numel():
            samples.clear()
    word.fill_(0)
    _pass(word, peer, send=True)
    return samples


def both_ways(peer: int, rank: int, buffer: torch.Tensor, *, patient: bool = False) -> float:
    """Return GB/s towards ``peer``; the lower rank sends first, then the other, not at the same time.

    The median sample counts, or with ``patient`` the fastest of more samples.
    """
    samples: list[float] = []
    for send in (rank < peer, rank > peer):
        samples += one_way(peer, buffer, send=send, patient=patient)
    seconds = min(samples) if patient else statistics.median(samples)
    return buffer.numel() * buffer.element_size() / seconds / 1e9


def collective_seconds(
    operation: str, size: int, place: RankPlacement, group: dist.ProcessGroup | None = None
) -> float:
    """Return the median time of a collective of ``size`` bytes over ``group`` (None: all), on the slowest rank.

    As many samples as fit into a second, at most 20, after one that warms up. What ``size`` counts:
    :mod:`preflight.core`.
    """
    call = _collective(operation, size, dist.get_world_size(group), place.device, group)

    def sample() -> float:
        dist.all_reduce(torch.zeros(1), group=group)  # so that a late rank's delay is not measured
        begin = time.perf_counter()
        call()
        synchronize(place.device)
        return time.perf_counter() - begin

    sample()
    first = largest([sample()], group)[0]
    number = max(1, min(20, int(COLLECTIVE_BUDGET_S / first)))
    return statistics.median(largest([sample() for _ in range(number)], group))


def _collective(
    operation: str, size: int, ranks: int, device: torch.device, group: dist.ProcessGroup | None
) -> Callable[[], object]:
    if operation == ALL_REDUCE:
        whole = torch.zeros(max(1, size // 4), device=device)
        return lambda: dist.all_reduce(whole, group=group)
    assert operation == ALL_GATHER
    part = torch.zeros(max(1, size // 4 // ranks), device=device)
    gathered = torch.empty(part.numel() * ranks, device=device)
    return lambda: all_gather_single(gathered, part, group=group)


# Who sends to whom, and what slow pairs say about nodes and links. Pure functions of numbers.

Pair = tuple[int, int]
"""Two nodes, the lower first."""
ALL_PAIRS_UP_TO = 16
"""Nodes for which every pair is measured; beyond, only neighbours at distances 1, 2, 4, …"""


def _pair(a: int, b: int) -> Pair:
    return (a, b) if a < b else (b, a)


def all_pairs_rounds(n: int) -> list[list[Pair]]:
    """Return every pair of ``n`` nodes once, in n - 1 rounds of disjoint pairs (n rounds if n is odd).

    The circle method: node n - 1 (or a bye) stays, the others move on by one place a round.
    """
    places = n + n % 2
    rounds = []
    for r in range(places - 1):
        meet = [(places - 1, r)] + [((r + k) % (places - 1), (r - k) % (places - 1)) for k in range(1, places // 2)]
        rounds.append(sorted(_pair(a, b) for a, b in meet if max(a, b) < n))
    return [r for r in rounds if r]


def neighbour_rounds(n: int) -> list[list[Pair]]:
    """Return pairs at distances 1, 2, 4, … up to n / 2 on a circle, in at most 2 log2(n) rounds of disjoint pairs.

    Steps of d split the circle into gcd(n, d) cycles; every second edge of a cycle makes one round, the
    others the next. In a cycle of odd length one edge is left out. Every node has at least log2(n) - 1 partners.
    """
    rounds = []
    distance = 1
    while 2 * distance <= n:
        length, halves = n // gcd(n, distance), ([], [])  # type: tuple[int, tuple[list[Pair], list[Pair]]]
        for start in range(gcd(n, distance)):
            cycle = [(start + k * distance) % n for k in range(length)]
            edges = length if length % 2 == 0 and length > 2 else length - 1
            for k in range(edges):
                halves[k % 2].append(_pair(cycle[k], cycle[(k + 1) % length]))
        rounds += [sorted(h) for h in halves if h]
        distance *= 2
    return rounds


def rounds_for(n: int) -> list[list[Pair]]:
    """Return the rounds of a sweep over ``n`` nodes."""
    return all_pairs_rounds(n) if n <= ALL_PAIRS_UP_TO else neighbour_rounds(n)


@dataclass
class Culprits:
    """Culprits of slow pairs, with (measured, expected) in the unit of the rates."""

    nodes: dict[int, tuple[float, float]] = field(default_factory=dict)
    links: dict[Pair, tuple[float, float]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.nodes or self.links)


def identify(rates: Mapping[Pair, float], *, share: float, floor: float = 0.0) -> Culprits:
    """Tell slow nodes from slow links.

    A node is slow if even its best pair is below ``share`` of what the nodes reach at best (the upper
    median over the nodes of their best pairs), or if most of its pairs, two at least, are slow links. A
    slow link is a pair of two other nodes that is below ``share`` of the upper median of such pairs.
    ``floor`` is an absolute threshold for both. Two nodes have one pair, which is a link. Right as long
    as fewer than half of the nodes are slow.
    """
    nodes = sorted({n for pair in rates for n in pair})
    best = dict.fromkeys(nodes, 0.0)
    for pair, rate in rates.items():
        for n in pair:
            best[n] = max(best[n], rate)
    out = Culprits()
    if len(nodes) > 2:
        expected = max(floor, share * upper_median(best.values()))
        out.nodes = {n: (best[n], expected) for n in nodes if best[n] < expected}
    rest = {p: r for p, r in rates.items() if not out.nodes.keys() & set(p)}
    expected = max(floor, share * upper_median(rest.values()))
    out.links = {p: (r, expected) for p, r in rest.items() if r < expected}
    while len(nodes) > 2:
        # The node with most of its remaining pairs slow; one at a time, for its pairs count against others too.
        slow, left = (Counter(n for p in pairs for n in p) for pairs in (out.links, rest))
        worst = _worst(slow, left)
        if worst is None:
            break
        measured = upper_median(r for p, r in rest.items() if worst in p)
        out.nodes[worst] = (measured, expected)
        rest = {p: r for p, r in rest.items() if worst not in p}
        out.links = {p: v for p, v in out.links.items() if worst not in p}
    return out


def _worst(slow: Counter[int], left: Counter[int]) -> int | None:
    """Return the node with the most slow pairs, of those with at least two that are most of their pairs; or None."""
    blamed = [n for n in slow if slow[n] >= 2 and 2 * slow[n] > left[n]]
    return max(blamed, key=lambda n: (slow[n], slow[n] / left[n], -n), default=None)


def suspects(
    rates: Mapping[Pair, float], culprits: Culprits, *, partners: int = 2, most: int = 64,
    seen: Collection[Pair] = (), clear: float = 0.0,
) -> list[Pair]:
    """Return the pairs to measure again: every slow link, and the best pairs of each slow node; the slowest ``most``.

    Pairs in ``seen``, measured again already, that reach less than ``clear`` of what is expected are left out.
    """
    wanted = {p: expected for p, (_, expected) in culprits.links.items()}
    for node, (_, expected) in culprits.nodes.items():
        own = sorted((p for p in rates if node in p), key=lambda p: -rates[p])
        wanted.update(dict.fromkeys(own[:partners], expected))
    found = [p for p, expected in wanted.items() if p not in seen or rates[p] >= clear * expected]
    return sorted(sorted(found, key=lambda p: rates[p])[:most])


def sacrifice(links: Collection[Pair], rates: Mapping[Pair, float]) -> dict[int, Pair]:
    """Choose nodes whose absence leaves no slow link: the one in most links first, then the one slower elsewhere.

    Returns: node → one of its slow links.
    """
    left, out = set(links), {}  # type: tuple[set[Pair], dict[int, Pair]]
    while left:
        count = Counter(n for p in left for n in p)
        elsewhere = {n: upper_median(r for p, r in rates.items() if n in p and p not in links) for n in count}
        worst = max(count, key=lambda n: (count[n], -elsewhere[n], n))
        out[worst] = min(p for p in left if worst in p)
        left = {p for p in left if worst not in p}
    return out


# Matmul rates by torch: of one core, and of each GPU, alone and with all GPUs at work.

GPU_SIZE = 8192
GROUP = 4
"""Matmuls between two timing events."""
TOGETHER_S = 2.0


@dataclass
class GpuRate:
    """Rates of one device. Memory in bytes, rates in TFLOP/s (bf16, dense, 2 n^3 operations per product)."""

    index: int
    name: str = ""
    memory_total: int = 0
    memory_free: int = 0
    alone_tflops: float = 0.0
    """Best sample while the other devices rest."""
    tflops: float = 0.0
    """Median sample while all devices work, as they do in training."""
    fault: str = ""
    """Failure; numbers measured before it are valid."""


def core_rate() -> CoreRate:
    """Measure fp32 products of 256 x 256 matrices on one thread; see :mod:`preflight.core`."""
    torch.set_num_threads(1)
    a, b = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
    out = torch.empty(SIZE, SIZE)
    return measure_core(lambda: torch.mm(a, b, out=out), 2.0 * SIZE**3)


class _Gpu:
    """Matrices on one device, and the samples taken with them."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        generator = torch.Generator(self.device).manual_seed(1)
        shape = (GPU_SIZE, GPU_SIZE)
        self.a = torch.randn(shape, device=self.device, dtype=torch.bfloat16, generator=generator)
        self.b = torch.randn(shape, device=self.device, dtype=torch.bfloat16, generator=generator)
        self.first = torch.mm(self.a, self.b)
        self.out = torch.empty_like(self.first)

    def enqueue(self, groups: int) -> list[torch.cuda.Event]:
        """Start ``groups`` groups of products; return the ``groups + 1`` events between them."""
        with torch.cuda.device(self.device):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(groups + 1)]
            events[0].record()
            for event in events[1:]:
                for _ in range(GROUP):
                    torch.mm(self.a, self.b, out=self.out)
                event.record()
        return events

    def rates(self, events: list[torch.cuda.Event]) -> list[float]:
        """Return TFLOP/s of each group, once all have run."""
        torch.cuda.synchronize(self.device)
        work = GROUP * 2.0 * GPU_SIZE**3
        return [work / (a.elapsed_time(b) * 1e-3) / 1e12 for a, b in zip(events, events[1:])]


def gpu_rates(meanwhile: Callable[[], None]) -> list[GpuRate]:
    """Measure every device that this process sees. ``meanwhile`` is called while all of them work.

    A device that fails is recorded, not raised. The same product made twice must give the same bits.
    """
    results = [GpuRate(i) for i in range(torch.cuda.device_count())]
    gpus: dict[int, _Gpu] = {}
    for r in results:
        with _noting_fault(r):
            r.name = torch.cuda.get_device_name(r.index)
            r.memory_free, r.memory_total = (int(n) for n in torch.cuda.mem_get_info(r.index))
            gpu = _Gpu(r.index)
            gpu.rates(gpu.enqueue(2))  # warm-up
            r.alone_tflops = max(gpu.rates(gpu.enqueue(8)))
            gpus[r.index] = gpu
    events: dict[int, list[torch.cuda.Event]] = {}
    for i, gpu in gpus.items():
        seconds = GROUP * 2.0 * GPU_SIZE**3 / (results[i].alone_tflops * 1e12)
        with _noting_fault(results[i]):
            events[i] = gpu.enqueue(max(3, min(200, int(TOGETHER_S / seconds))))
    meanwhile()
    for i, started in events.items():
        r, gpu = results[i], gpus[i]
        with _noting_fault(r):
            r.tflops = statistics.median(gpu.rates(started))
            if not torch.equal(gpu.first, gpu.out):
                r.fault = "the same product gave other bits the second time"
    return results


@contextmanager
def _noting_fault(rate: GpuRate) -> Iterator[None]:
    """Keep the first line of what torch says when the device fails."""
    try:
        yield
    except RuntimeError as error:
        rate.fault = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
