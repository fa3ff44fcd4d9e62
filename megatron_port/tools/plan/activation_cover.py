"""The choice of what a stage's layers do not keep: least added seconds that save the bytes which the stage lacks.

A covering knapsack. Its items are ways not to keep a site: k layers that recompute or partition it add k times its
seconds to a micro-batch, and save k times its bytes in every micro-batch in flight, less one time, because the layer
that runs backward has them again. Swapping costs nothing until the copies outlast the passes, and then the same for
every byte, whatever it belongs to. So items are searched, by branch and bound with the bound of the fractional problem
(Dantzig, 1957), and what they leave lacking is swapped, site by site. Exact but for whole layers of swapped sites, and
where there are too many ways to look at (``MOST_LOOKED_AT``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_port.core.model.activation_sites import Decision, choice
from megatron_port.core.model.ops import Site
from megatron_port.tools.plan.swap import HostLink

MOST_LOOKED_AT = 50_000
"""Nodes of the search at the most. Swapping whole layers is not in the bound, so that with 48 layers on one stage it
would look at millions; what the first thousands find is within 7 % of the least added seconds there."""

Counts = dict[str, int]
"""A site's choice, as activations.layers states it → the number of layers that make it."""


@dataclass(frozen=True)
class Item:
    """A way not to keep a site of the layers of a stage."""

    site: Site
    seconds: float
    """Added to the passes of a micro-batch by one layer."""
    size: float
    """Bytes that one layer saves in one micro-batch."""
    way: Decision = "recompute"

    @property
    def name(self) -> str:
        """As activations.layers states it."""
        return choice(self.site, self.way)


@dataclass(frozen=True)
class Swap:
    """Sites that may be swapped: bytes of each, in how many layers, and the link."""

    sizes: Mapping[Site, float]
    layers: Mapping[Site, int]
    link: HostLink


def saved(item: Item, layers: int, held: float) -> float:
    """Return the bytes of a stage's peak that one item in so many layers saves.

    ``held``: micro-batches in flight.
    """
    return item.size * max(layers * held - 1, 0) if layers else 0.0


class _Search:
    """Branch and bound over the numbers of layers of each item; see :func:`cover`."""

    def __init__(
        self, items: Sequence[Item], layers: int, held: float, after: Mapping[Site, Site], swap: Swap | None
    ) -> None:
        self.layers, self.held, self.after, self.swap = layers, held, after, swap
        ratio = {item.name: item.seconds / item.size for item in items if item.size > 0}
        self.useful = {item.site for item in items if item.name in ratio}
        # Such that a site comes after the one that it depends on.
        self.order = sorted(
            (item for item in items if item.name in ratio),
            key=lambda i: (max(ratio[i.name], ratio.get(after.get(i.site, i.site), 0.0)), i.site in after),
        )
        self.cheapest = [
            sorted((i.seconds / i.size / held, i.size * layers * held) for i in self.order[at:])
            for at in range(len(self.order) + 1)
        ]
        self.swappable = [] if swap is None else sorted(
            ((size, site) for site, size in swap.sizes.items() if size > 0 and swap.layers.get(site, 0)), reverse=True
        )
        per_layer = sum(size * swap.layers[site] for size, site in self.swappable) if swap else 0.0
        self.segments = self._segments(per_layer)
        self.most = [
            sum(saved(i, layers, held) for i in self.order[at:]) + per_layer * held
            for at in range(len(self.order) + 1)
        ]
        self.best: tuple[float, Counts] | None = None
        self.looked_at = 0

    def _segments(self, most: float) -> list[tuple[float, float]]:
        """Seconds per saved byte, and saved bytes, of what is swapped first, then, and last."""
        if self.swap is None or not most:
            return []
        link, out, done = self.swap.link, [], 0.0
        ends = sorted((link.forward * link.rate, link.backward * link.rate))
        for slope, end in zip((0.0, 1.0, 2.0), (*ends, most)):
            width = max(min(end, most) - done, 0.0)
            out.append((slope / link.rate / self.held, width * self.held))
            done += width
        return out

    def bound(self, at: int, lack: float) -> float:
        """Seconds at the least: the cheapest bytes first, the last in part."""
        seconds = 0.0
        for ratio, size in sorted([*self.cheapest[at], *self.segments]):
            if lack <= 0:
                break
            part = min(lack, size)
            seconds, lack = seconds + part * ratio, lack - part
        return seconds

    def fill(self, lack: float, used: Mapping[Site, int]) -> tuple[float, Counts] | None:
        """Swap what still lacks: seconds and counts; None: all that is left saves less."""
        if self.swap is None:
            return None
        free = {site: self.swap.layers[site] - used.get(site, 0) for _, site in self.swappable}
        counts: dict[Site, int] = {}

        def add(site: Site, size: float, count: int) -> None:
            nonlocal lack
            if count > 0:
                before = counts.get(site, 0)
                counts[site] = before + count
                free[site] -= count
                lack -= size * (max(counts[site] * self.held - 1, 0) - (max(before * self.held - 1, 0)))

        for size, site in self.swappable:  # the largest first, as long as whole layers fit into what lacks
            add(site, size, min(free[site], int((lack + size) // (size * self.held)) if lack > 0 else 0))
        for size, site in reversed(self.swappable):  # then the smallest that is enough
            if lack > 0 and free[site] > 0 and size * (self.held - (0 if counts.get(site) else 1)) >= lack:
                add(site, size, 1)
        for size, site in self.swappable:
            while lack > 0 and free[site] > 0:
                add(site, size, 1)
        if lack > 0:
            return None
        moved = sum(size * counts.get(site, 0) for size, site in self.swappable)
        return self.swap.link.seconds(moved), {choice(site, "swap"): n for site, n in counts.items()}

    def note(self, seconds: float, counts: Counts) -> None:
        """Keep a solution if none before it was as good."""
        if self.best is None or seconds < self.best[0]:
            self.best = seconds, {name: n for name, n in counts.items() if n}

    def run(self, at: int, lack: float, seconds: float, chosen: Counts, used: dict[Site, int]) -> None:
        """Look at every number of layers of the items from ``at`` on."""
        self.looked_at += 1
        if lack <= 0:
            self.note(seconds, chosen)
            return
        if self.best is not None and self.looked_at > MOST_LOOKED_AT:
            return
        if lack > self.most[at] or (self.best is not None and seconds + self.bound(at, lack) >= self.best[0]):
            return
        moved = self.fill(lack, used)
        if moved is not None:
            self.note(seconds + moved[0], chosen | moved[1])
        if at == len(self.order):
            return
        item, before = self.order[at], used.get(self.order[at].site, 0)
        limit = self.layers - before
        if self.after.get(item.site) in self.useful and item.way == "recompute":
            limit = min(limit, used.get(self.after[item.site], 0))
        for count in range(limit, -1, -1):
            chosen[item.name], used[item.site] = count, before + count
            self.run(at + 1, lack - saved(item, count, self.held), seconds + count * item.seconds, chosen, used)
        chosen.pop(item.name, None)
        used[item.site] = before


def cover(
    items: Sequence[Item], layers: int, held: float, lacking: float, *, after: Mapping[Site, Site],
    swap: Swap | None = None,
) -> Counts | None:
    """Return the number of layers that make each choice, of least seconds, that saves ``lacking`` bytes.

    Args:
        layers: those of the stage.
        held: micro-batches in flight.
        after: a site → the one whose argument it is, and without which it is not recomputed.
        swap: None: nothing is swapped.

    Returns:
        None: even all of them save less.
    """
    search = _Search(items, layers, held, after, swap)
    search.run(0, lacking, 0.0, {}, {})
    return None if search.best is None else search.best[1]
