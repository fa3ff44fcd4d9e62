"""Activation plans from what the first steps of a run measured, instead of the planner's times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_port.core.model.activation_sites import RECOMPUTED, REPLICATED, SITES
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.model.ops import Site
from megatron_port.tools.plan.activation_cover import Item, Swap
from megatron_port.tools.plan.activations import copied_sites
from megatron_port.tools.plan.case import Case
from megatron_port.tools.plan.swap import HostLink


@dataclass(frozen=True, kw_only=True)
class StageMeasures:
    """The largest of what the ranks of a stage measured, for one micro-batch; 0: not known."""

    seconds: dict[Site, float] = field(default_factory=dict)
    """Seconds to run a site's operation again in one layer."""
    sizes: dict[Site, float] = field(default_factory=dict)
    """Bytes that one layer saves of a site."""
    forward: float = 0.0
    """Seconds of the stage's forward passes, and of its backward passes without what they ran again."""
    backward: float = 0.0
    copy: float = 0.0
    """Seconds per byte to or from the host."""
    gather: float = 0.0
    """Seconds per byte of what tensor-parallel ranks gather."""

    def row(self) -> list[float]:
        """Return the numbers in a fixed order, for a collective."""
        by_site = [each.get(site, 0.0) for each in (self.seconds, self.sizes) for site in SITES]
        return [*by_site, self.forward, self.backward, self.copy, self.gather]

    @classmethod
    def of_row(cls, row: Sequence[float]) -> StageMeasures:
        """Return what :meth:`row` made a list of."""
        count = len(SITES)
        return cls(
            seconds=dict(zip(SITES, row[:count])), sizes=dict(zip(SITES, row[count : 2 * count])),
            forward=row[-4], backward=row[-3], copy=row[-2], gather=row[-1],
        )


ROW = len(StageMeasures().row())
"""Numbers of one stage."""


def measured_sizes(case: Case, measures: StageMeasures) -> dict[Site, float]:
    """Return the bytes of each site; of a copy that is saved in place of an operation's argument, as the argument's.

    That much is kept when the copy is dropped and made again.
    """
    sizes = {site: measures.sizes.get(site, 0.0) for site in SITES}
    for site, (reader, copy) in copied_sites(case, model_spec(case.model).layers[0]).items():
        moved = max(min(copy - sizes[site], sizes[reader]), 0.0)
        sizes[site], sizes[reader] = sizes[site] + moved, sizes[reader] - moved
    return sizes


def measured_items(case: Case, measures: StageMeasures) -> tuple[Item, ...]:
    """Return the ways to recompute or partition a site of a layer."""
    sizes, copied = measured_sizes(case, measures), copied_sites(case, model_spec(case.model).layers[0])
    items = [Item(site, measures.seconds.get(site, 0.0), sizes[site]) for site in RECOMPUTED]
    if measures.gather > 0 and case.tp > 1 and not case.sequence_parallel:
        items += [
            Item(site, measures.gather * sizes[site], sizes[site] * (1 - 1 / case.tp), "partition")
            for site in REPLICATED if site not in copied
        ]
    return tuple(items)


def measured_swap(case: Case, measures: StageMeasures, layers: dict[Site, int]) -> Swap | None:
    """Return what a stage may swap, ``layers`` of each site; None: the link to the host was not measured."""
    if measures.copy <= 0:
        return None
    sizes = measured_sizes(case, measures)
    for site in copied_sites(case, model_spec(case.model).layers[0]):
        sizes[site] = 0.0
    return Swap(sizes, layers, HostLink(1 / measures.copy, measures.forward, measures.backward))
