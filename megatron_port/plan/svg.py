"""A few shapes and charts as inline SVG. Colours are CSS variables of the page, so that it can be light or dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = 8
"""Series colours of the page: ``var(--c0)`` to ``var(--c7)``."""


def colour(index: int) -> str:
    """The CSS colour of a series."""
    return f"var(--c{index % COLOURS})"


def text(x: float, y: float, words: str, *, anchor: str = "start", kind: str = "", rotate: float = 0.0) -> str:
    """A line of text; ``kind``: class of the page (``small``, ``strong``, ``axis``)."""
    turn = f' transform="rotate({rotate:g} {x:.1f} {y:.1f})"' if rotate else ""
    name = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{name}{turn}>{escape(words)}</text>'


def rectangle(x: float, y: float, width: float, height: float, fill: str, *, title: str = "", more: str = "") -> str:
    """A rectangle; ``title``: shown when pointed at."""
    head = f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0):.2f}" height="{max(height, 0):.2f}" '
    head += f'style="fill:{fill}"{" " + more if more else ""}'
    return f"{head}><title>{escape(title)}</title></rect>" if title else f"{head}/>"


def line(x1: float, y1: float, x2: float, y2: float, kind: str = "grid") -> str:
    """A straight line of a class."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def drawing(width: float, height: float, parts: Sequence[str], label: str) -> str:
    """An <svg> that scales with its column; ``label``: for readers who do not see it."""
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label, quote=True)}" '
        f'style="max-width:{width:g}px">' + "".join(parts) + "</svg>"
    )


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values that cover [low, high]."""
    if not high > low:
        return [low]
    raw = (high - low) / max(count - 1, 1)
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    out = []
    while (value := first * step) <= high + step * 0.001:
        if value >= low - step * 0.001:
            out.append(value)
        first += 1
    return out


def short(value: float) -> str:
    """A number for an axis: 4 digits, thousands as 12k."""
    if abs(value) >= 1e4:
        return f"{value / 1e3:,.4g}k"
    return f"{value:.4g}"


def legend(x: float, y: float, names: Sequence[tuple[str, str]], width: float) -> tuple[str, float]:
    """Swatches (name, CSS colour) in rows of at most ``width``; the SVG and its height."""
    out, at, row = [], x, y
    for name, fill in names:
        need = 22 + 6.6 * len(name)
        if at > x and at + need > x + width:
            at, row = x, row + 18
        out.append(rectangle(at, row - 9, 11, 11, fill, more='rx="2"') + text(at + 16, row, name, kind="small"))
        at += need
    return "".join(out), row - y + 18


@dataclass(frozen=True)
class Series:
    """Points of a line chart."""

    name: str
    points: Sequence[tuple[float, float]]
    hollow: Sequence[bool] = ()
    """Points drawn hollow (layouts that do not fit)."""
    dashed: bool = False
    marks: bool = True


def chart(
    series: Sequence[Series], *, x_label: str, y_label: str, label: str, width: float = 460, height: float = 260,
    log_x: bool = False, least: float = 0.0, percent: bool = False, rules: Sequence[tuple[float, str]] = (),
) -> str:
    """A line chart. ``log_x``: x in octaves; ``least``: y starts there, or below; ``rules``: lines (y, name)."""
    every = [p for s in series for p in s.points]
    if not every:
        return drawing(width, 40, [text(10, 24, "nothing to show")], label)
    xs, ys = [x for x, _ in every], [y for _, y in every] + [y for y, _ in rules]
    low = min(least, min(ys) - 0.06 * (max(ys) - min(ys)) if least else least)
    high = max(ys) + 0.04 * (max(ys) - low) if max(ys) > low else low + 1
    left, right, top, foot = 66.0, width - 16, 14.0, height - 44

    def place(x: float) -> float:
        at = math.log2(x) if log_x else x
        a, b = (math.log2(min(xs)), math.log2(max(xs))) if log_x else (min(xs), max(xs))
        return left + 10 + (right - left - 20) * ((at - a) / (b - a) if b > a else 0.5)

    def level(y: float) -> float:
        return foot - (foot - top) * (y - low) / (high - low)

    out = []
    levels = ticks(low, high)
    digits = 0 if len(levels) < 2 or levels[1] - levels[0] > 0.0099 else 1
    for value in levels:
        shown = f"{100 * value:.{digits}f} %" if percent else short(value)
        out += [line(left, level(value), right, level(value)), text(left - 6, level(value) + 4, shown, anchor="end",
                                                                    kind="axis")]
    last = -1e9
    for x in sorted(set(xs)):
        if place(x) - last >= 9 * len(short(x)) or not last > 0:
            out.append(text(place(x), foot + 16, short(x), anchor="middle", kind="axis"))
            last = place(x)
    for y, name in rules:
        out += [line(left, level(y), right, level(y), "rule"),
                text(right, level(y) - 4, name, anchor="end", kind="small")]
    for i, s in enumerate(series):
        out.append(_curve(s, colour(i), place, level))
    out += [text((left + right) / 2, height - 8, x_label, anchor="middle", kind="axis"),
            text(13, (top + foot) / 2, y_label, anchor="middle", kind="axis", rotate=-90)]
    if len(series) > 1:
        swatches, extra = legend(left, height + 10, [(s.name, colour(i)) for i, s in enumerate(series)], right - left)
        out.append(swatches)
        height += extra
    return drawing(width, height, out, label)


def _curve(s: Series, ink: str, place: Callable[[float], float], level: Callable[[float], float]) -> str:
    path = " ".join(f"{'L' if i else 'M'}{place(x):.1f} {level(y):.1f}" for i, (x, y) in enumerate(s.points))
    dash = ' stroke-dasharray="5 4"' if s.dashed else ""
    out = [f'<path d="{path}" class="curve" style="stroke:{ink}"{dash}/>']
    for i, (x, y) in enumerate(s.points if s.marks else ()):
        fill = "var(--paper)" if i < len(s.hollow) and s.hollow[i] else ink
        out.append(
            f'<circle cx="{place(x):.1f}" cy="{level(y):.1f}" r="3.6" style="fill:{fill};stroke:{ink}" '
            f'stroke-width="1.6"><title>{escape(f"{s.name}: {short(x)}: {y:.4g}")}</title></circle>'
        )
    return "".join(out)
