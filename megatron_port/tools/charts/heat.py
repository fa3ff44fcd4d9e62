"""Heat maps: a cell for each row and column, coloured by level. Neighbours of a level are one stroke of a path."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from megatron_port.tools.charts.shapes import text


def heat_map(
    levels: Sequence[Sequence[int]], fills: Sequence[str], *, left: float, top: float, width: float, height: float
) -> list[str]:
    """Draw ``levels`` [rows][columns], row 0 at the top; each cell has the colour ``fills[level]``, none below 0."""
    columns = len(levels[0]) if levels else 0
    if not columns:
        return []
    wide, tall = width / columns, height / len(levels)
    paths: dict[int, list[str]] = {}
    for i, row in enumerate(levels):
        at = 0
        for level, run in groupby(row):
            count = len(list(run))
            if level >= 0:
                paths.setdefault(level, []).append(f"M{at} {i}h{count}v1h-{count}z")
            at += count
    drawn = "".join(f'<path style="fill:{fills[level]}" d="{"".join(parts)}"/>' for level, parts in
                    sorted(paths.items()))
    return [f'<g transform="translate({left:g} {top:g}) scale({wide:.5g} {tall:.5g})" shape-rendering="crispEdges">'
            f"{drawn}</g>"]


def row_names(names: Sequence[str], *, left: float, top: float, height: float, each: float = 14.0) -> list[str]:
    """Write the names of rows to the left of a map, every so many of them where they would touch."""
    tall = height / max(len(names), 1)
    every = max(1, -int(-each // tall))
    return [text(left - 6, top + (i + 0.5) * tall + 4, name, anchor="end", kind="axis")
            for i, name in enumerate(names) if i % every == 0]
