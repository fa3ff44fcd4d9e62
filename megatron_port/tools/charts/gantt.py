"""Gantt charts: a row for each worker, a bar for each piece of its work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_port.tools.charts.shapes import rectangle, text


@dataclass(frozen=True)
class Bar:
    """A piece of work."""

    start: float
    end: float
    fill: str
    """CSS colour."""
    mark: str = ""
    """Text on the bar, left out where the bar is too narrow."""
    title: str = ""
    """Shown when pointed at."""
    kind: str = "cellmark"
    """Class of the mark."""
    tall: float = 1.0
    """Share of the row's height that it takes, from the foot up."""


def gantt(
    rows: Sequence[Sequence[Bar]], *, left: float, top: float, scale: float, each: float, span: float,
    names: Sequence[str] = (), first: float = 0.0,
) -> list[str]:
    """Draw the rows from ``top`` down, ``each`` pixels high; bars over an idle ground.

    Args:
        scale: pixels per unit of time.
        span: units of time that the ground reaches.
        names: of the rows; written to the left, every so many of them where there are more than 32.
        first: time at the left edge.
    """
    out = []
    for i, row in enumerate(rows):
        y = top + i * each + 1
        if i < len(names) and (len(rows) <= 32 or i % (len(rows) // 16) == 0):
            out.append(text(left - 8, y + each / 2 + 3, names[i], anchor="end", kind="axis"))
        out.append(rectangle(left, y, span * scale, each - 2, "var(--idle)"))
        for bar in row:
            x, wide = left + (bar.start - first) * scale, (bar.end - bar.start) * scale
            tall = (each - 2) * bar.tall
            out.append(rectangle(x, y + each - 2 - tall, max(wide - 0.6, 0.5), tall, bar.fill, title=bar.title))
            if bar.mark and wide > 12 and each > 15:
                out.append(text(x + wide / 2, y + each / 2 + 2, bar.mark, anchor="middle", kind=bar.kind))
    return out
