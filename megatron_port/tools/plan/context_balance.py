"""How evenly ranks that share a sequence divide its attention: the work of the busiest, by the mean.

The query at position i of its document sees min(i + 1, window) keys, so late positions are work and early ones are not.
``contiguous`` gives the last rank 2 − 1/cp times the mean; ``zigzag`` pairs chunk i of 2·cp with the i-th from the end,
which is even as long as nothing but the causal mask limits what a query sees; ``balanced`` is the same without
documents, and with them deals out blocks by their work, which is taken as even. For the others the mean over drawn
samples is taken then, with lengths from an exponential distribution. All ranks wait for the busiest in each layer and
micro-batch.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

ORDERS = ("contiguous", "zigzag", "balanced")
DRAWS = 32
"""Micro-batches over which the mean is taken where there are documents."""


@lru_cache(maxsize=4096)
def work_imbalance(order: str, cp: int, seq: int, window: int = 0, document: float = 0.0, samples: int = 1) -> float:
    """Return the attention work of the busiest of ``cp`` ranks over the mean.

    ``window``: keys that a query sees at most; 0: all before it. ``document``: mean length of the document that a token
    is in; 0: the sample is one. ``samples``: of a micro-batch, which share an order.

    Raises:
        ValueError: no such order.
    """
    if order not in ORDERS:
        raise ValueError(f"unknown order {order!r}; one of {', '.join(ORDERS)}")
    alone = not document or document >= seq
    if cp == 1 or (order == "balanced" and not alone):
        return 1.0
    if alone:
        return _busiest(order, cp, seq, [_work(seq, window, [0])])
    draw = random.Random(0)
    found = []
    for _ in range(DRAWS):
        # The document that a token is in is twice as long, in the mean over tokens, as one that is drawn.
        starts = [_starts(seq, document / 2, draw) for _ in range(samples)]
        found.append(_busiest(order, cp, seq, [_work(seq, window, one) for one in starts]))
    return sum(found) / DRAWS


Work = Callable[[float], float]
"""Position → work of all positions before it."""


def _starts(seq: int, mean: float, draw: random.Random) -> list[int]:
    """First positions of a sample's documents. The first of them began before the sample."""
    out, at = [0], draw.expovariate(1 / mean)
    while at < seq:
        out.append(int(at))
        at += max(draw.expovariate(1 / mean), 1.0)
    return out


def _work(seq: int, window: int, starts: list[int]) -> Work:
    """Work before a position of a sample with documents from ``starts`` on."""
    def within(length: float) -> float:
        if not window or length <= window:
            return length * length / 2
        return window * (length - window / 2)

    before = [0.0]
    for start, stop in pairwise([*starts, seq]):
        before.append(before[-1] + within(stop - start))

    def until(position: float) -> float:
        i = bisect_right(starts, position) - 1
        return before[i] + within(position - starts[i])

    return until


def _busiest(order: str, cp: int, seq: int, works: list[Work]) -> float:
    count = cp if order == "contiguous" else 2 * cp
    ends = [seq * i / count for i in range(count + 1)]
    each = [sum(work(b) - work(a) for work in works) for a, b in pairwise(ends)]
    loads = each if order == "contiguous" else [each[i] + each[-1 - i] for i in range(cp)]
    return max(loads) * cp / sum(loads)
