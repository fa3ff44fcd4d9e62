"""Collectives of a node as a run has them: after products that all ranks compute, and beside such products.

Ranks that only wait for one another, call after call, are in step and have their cores to themselves. In a run each
comes from its own arithmetic; on a CPU the library's threads then take cores from it. So a collective's time is that of
a product and the collective less that of the product, and what products hide of it is measured too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from megatron_port.core.dist.compat import all_gather_single, reduce_scatter_single
from megatron_port.tools.preflight.exchange import meet, synchronize

ROUNDS = 5
EXCHANGE_SIZES = {
    "cpu": (4 << 10, 64 << 10, 256 << 10, 1 << 20, 8 << 20),
    "cuda": (4 << 10, 256 << 10, 4 << 20, 64 << 20),
}
SIDE = {"cpu": 512, "cuda": 4096}
"""Sides of the square product beside collectives, which takes about as long as a collective of an activation."""


@dataclass(frozen=True)
class CollectiveTime:
    """A collective over all ranks; ``size``: bytes of the whole buffer."""

    kind: str
    """all-reduce | all-gather | reduce-scatter | transfer (from one rank to another)"""
    size: int
    seconds: float
    """Seconds of the collective after products."""
    hidden: float = 0.0
    """Seconds of these that products beside it hide (negative: both together take longer than one by one)."""
    product: float = 0.0
    """Seconds of those products, about as long as the collective."""

    def ranks(self, group: int) -> int:
        """Ranks that took part of a group of so many."""
        return 2 if self.kind == "transfer" else group


def collective_times(device: torch.device, ranks: int, budget_s: float) -> list[CollectiveTime]:
    """All-reduce, all-gather and reduce-scatter of fp32 buffers, small to large; as many calls on each rank."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    side = SIDE[kind]
    a, b = (torch.randn(side, side, device=device) for _ in range(2))
    if kind == "cuda":
        a, b = a.bfloat16(), b.bfloat16()
    product = partial(torch.mm, a, b, out=torch.empty_like(a))
    out = []
    for size in EXCHANGE_SIZES[kind]:
        whole = torch.zeros(size // 4 // ranks * ranks, device=device)
        part = torch.zeros(whole.numel() // ranks, device=device)
        works: dict[str, Callable[..., dist.Work]] = {
            "all-reduce": partial(dist.all_reduce, whole, async_op=True),
            "all-gather": partial(all_gather_single, whole, part, async_op=True),
            "reduce-scatter": partial(reduce_scatter_single, part, whole, async_op=True),
        }
        out += [_measured(name, whole.numel() * 4, work, product, device, budget_s) for name, work in works.items()]
        if ranks % 2 == 0:
            out.append(_transfer(whole, product, device, budget_s))
    return out


def _transfer(x: torch.Tensor, product: Callable[[], object], device: torch.device, budget_s: float) -> CollectiveTime:
    """A tensor from one rank of a pair to the other, which waits for it, as a stage does: half of what two products
    and two transfers, there and back, take longer than two products."""
    rank, y = dist.get_rank(), torch.empty_like(x)
    peer = rank ^ 1

    def there_and_back() -> None:
        arrives = dist.irecv(y, peer)
        assert arrives is not None
        if rank > peer:
            arrives.wait()
        product()
        leaves = dist.isend(x, peer)
        assert leaves is not None
        if rank < peer:
            arrives.wait()
        leaves.wait()

    both = agreed_seconds(there_and_back, device, 2)
    calls = max(4, min(200, int(4 * budget_s / ROUNDS / max(both, 1e-6))))
    rounds = [[agreed_seconds(one, device, calls) for one in (product, there_and_back)] for _ in range(ROUNDS)]
    alone, cycle = map(statistics.median, zip(*rounds))
    return CollectiveTime("transfer", x.numel() * 4, max(cycle / 2 - alone, 1e-7), 0.0, alone)


def _measured(
    kind: str, size: int, work: Callable[[], dist.Work], product: Callable[[], object], device: torch.device,
    budget_s: float,
) -> CollectiveTime:
    def products() -> None:
        for _ in range(count):
            product()

    def after() -> None:
        products()
        work().wait()

    def beside() -> None:
        started = work()
        products()
        started.wait()

    count = 1
    first = agreed_seconds(product, device, 4)
    count = max(1, round((agreed_seconds(after, device, 4) - first) / max(first, 1e-6)))
    both = agreed_seconds(after, device, 2)
    calls = max(4, min(200, int(4 * budget_s / ROUNDS / max(both, 1e-6))))
    rounds = [  # in turn, so that what else the machine does is in all of them
        [agreed_seconds(one, device, calls) for one in (products, after, beside)] for _ in range(ROUNDS)
    ]
    alone, one_by_one, together = map(statistics.median, zip(*rounds))
    return CollectiveTime(kind, size, max(one_by_one - alone, 1e-7), one_by_one - together, alone)


def agreed_seconds(work: Callable[[], object], device: torch.device, calls: int) -> float:
    """Mean seconds of a call on the slowest rank, which all make as often."""
    synchronize(device)
    meet()
    started = time.perf_counter()
    for _ in range(calls):
        work()
    synchronize(device)
    mine = torch.tensor([(time.perf_counter() - started) / calls], dtype=torch.float64)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return float(mine)


def overlap_share(times: list[CollectiveTime]) -> float:
    """Share of what products can hide of collectives that they do hide, between 0 and 1."""
    together = [t for t in times if t.kind != "transfer"]
    possible = sum(min(t.seconds, t.product) for t in together)
    return min(max(sum(t.hidden for t in together) / possible, 0.0), 1.0) if possible else 1.0
