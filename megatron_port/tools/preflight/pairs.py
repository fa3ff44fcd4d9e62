"""Who sends to whom, and what slow pairs say about nodes and links. Pure functions of numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import gcd

from megatron_port.tools.preflight.verdict import upper_median

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
