"""Line charts: curves, bands and points over an axis that is linear, of octaves or of decades."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from megatron_port.core.io.numbers import decades, number, ticks
from megatron_port.tools.charts.page import colour, drawing, legend, line, text

LEFT, RIGHT, TOP, BOTTOM = 66.0, 16.0, 14.0, 34.0
HOVER = 120
"""Columns that show their values under the pointer."""


@dataclass(frozen=True)
class Series:
    """One curve of a chart."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    """Which of the style sheet's series colours."""
    band: Sequence[tuple[float, float, float]] = ()
    """(x, low, high): drawn behind the curve."""
    joined: bool = True
    """A curve through the points; without, the points alone."""
    dots: bool = False
    """A dot at each point of the curve."""
    hollow: Sequence[bool] = ()
    """Points whose dots are hollow."""
    dashed: bool = False
    faint: bool = False
    """Thin and pale, behind another curve."""


@dataclass(frozen=True)
class Mark:
    """A vertical line at ``x``, or a tick at the top of the chart."""

    x: float
    text: str
    bad: bool = False
    short: bool = False


@dataclass(frozen=True)
class Note:
    """Words beside a point, inside the chart."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Axis:
    """Range, scale and labels of an axis."""

    label: str = ""
    form: Callable[[float], str] = number
    least: float | None = None
    """It begins there, or below where a value is smaller; None: below the smallest value."""
    log: int | None = None
    """Base of a logarithmic axis, 0: linear, None: decades where values from above 0 span more than two of them."""


@dataclass(frozen=True)
class _Scale:
    """Values to pixels; ``low`` and ``high`` are logarithms where there is a base."""

    low: float
    high: float
    begin: float
    end: float
    log: int = 0

    def __call__(self, value: float) -> float:
        at = math.log(max(value, 1e-300), self.log) if self.log else value
        return self.begin + (at - self.low) / (self.high - self.low) * (self.end - self.begin)


def line_chart(
    series: Sequence[Series], *, label: str, x: Axis | None = None, y: Axis | None = None, width: float = 720,
    height: float = 260, marks: Sequence[Mark] = (), rules: Sequence[tuple[float, str]] = (),
    notes: Sequence[Note] = (), keys: Sequence[tuple[str, str]] = (), title: str = "",
) -> str:
    """Draw curves; empty where there is no point.

    Args:
        label: what screen readers are told.
        height: without the title, the name of the x axis and the legend, which stands below where there are two names.
        rules: horizontal lines (y, name).
        keys: further entries of the legend (name, CSS colour).
    """
    series = [s for s in series if s.points]
    if not series:
        return ""
    x, y = x or Axis(), y or Axis()
    top = TOP + (26 if title else 0)
    bottom = top + height - TOP - BOTTOM
    across = _x_scale([at for s in series for at, _ in s.points], x, width)
    up = _y_scale([v for s in series for _, v in s.points] + [v for v, _ in rules], y, bottom, top)
    out = [text(LEFT - 50, 20, title, kind="strong")] if title else []
    out += _grid(up, y, width) + _x_ticks(across, x, series, bottom)
    out += _axis_names(x, y, width, top, bottom)
    for mark in marks:
        if across.low <= mark.x <= across.high:
            out.append(line(across(mark.x), top, across(mark.x), top + 9 if mark.short else bottom,
                            "mark bad" if mark.bad else "mark", title=mark.text))
    for value, name in rules:
        out += [line(LEFT, up(value), width - RIGHT, up(value), "rule"),
                text(width - RIGHT, up(value) - 4, name, anchor="end", kind="small")]
    for one in series:
        out += _band(one, across, up)
    for one in series:
        out += _curve(one, across, up)
    out += [_note(note, across, up, width) for note in notes]
    out += _hover(series, across, x, y, (top, bottom))
    foot = bottom + BOTTOM + (14 if x.label else 0)
    names = [*([(s.name, colour(s.colour)) for s in series] if len(series) + len(keys) > 1 else []), *keys]
    if names:
        swatches, extra = legend(LEFT, foot + 10, names, width - LEFT - RIGHT)
        out.append(swatches)
        foot += extra
    return drawing(width, foot, out, label)


def _x_scale(xs: Sequence[float], axis: Axis, width: float) -> _Scale:
    low, high = (math.log(f(xs), axis.log) if axis.log else f(xs) for f in (min, max))
    if high <= low:
        low, high = low - 0.5, high + 0.5
    # Octaves have few points: their dots stand clear of the edges.
    edge = 10 if axis.log else 0
    return _Scale(low, high, LEFT + edge, width - RIGHT - edge, axis.log or 0)


def _y_scale(ys: Sequence[float], axis: Axis, bottom: float, top: float) -> _Scale:
    low, high = min(ys), max(ys)
    if low > 0 and (axis.log or (axis.log is None and axis.least is None and high / low > 100)):
        base = axis.log or 10
        a, b = math.log(low, base), math.log(high, base)
        pad = 0.03 * (b - a) or 0.5
        return _Scale(a - pad, b + pad, bottom, top, base)
    fixed = axis.least is not None and low >= axis.least
    if axis.least is not None:
        low = min(low, axis.least)
    if high <= low:
        high = low + (abs(low) * 0.1 or 1.0)
        low = low if fixed else low - (high - low)
    pad = 0.05 * (high - low)
    return _Scale(low if fixed else low - pad, high + pad, bottom, top)


def _grid(up: _Scale, axis: Axis, width: float) -> list[str]:
    """Horizontal lines with their values."""
    out = []
    for value in decades(up.low, up.high) if up.log == 10 else ticks(up.low, up.high):
        out += [line(LEFT, up(value), width - RIGHT, up(value)),
                text(LEFT - 8, up(value) + 4, axis.form(value), anchor="end", kind="axis")]
    return [*out, line(LEFT, up.begin, width - RIGHT, up.begin, "foot")]


def _x_ticks(across: _Scale, axis: Axis, series: Sequence[Series], bottom: float) -> list[str]:
    """Whole numbers below the chart; on octaves the points' own values, where they have room."""
    if across.log:
        values = sorted({at for s in series for at, _ in s.points})
    else:
        values = [v for v in ticks(across.low, across.high, 6) if v == round(v)]
    out, free = [], -math.inf
    for value in values:
        room = 4.5 * len(axis.form(value))
        if across(value) - room >= free:
            out.append(text(across(value), bottom + 18, axis.form(value), anchor="middle", kind="axis"))
            free = across(value) + room
    return out


def _axis_names(x: Axis, y: Axis, width: float, top: float, bottom: float) -> list[str]:
    out = []
    if x.label:
        out.append(text((LEFT + width - RIGHT) / 2, bottom + 36, x.label, anchor="middle", kind="axis"))
    if y.label:
        out.append(text(13, (top + bottom) / 2, y.label, anchor="middle", kind="axis", rotate=-90))
    return out


def _band(one: Series, across: _Scale, up: _Scale) -> list[str]:
    if len(one.band) < 2:
        return []
    low, high = (up.log**up.low, up.log**up.high) if up.log else (up.low, up.high)
    there = [f"{across(at):.1f},{up(min(most, high)):.1f}" for at, _, most in one.band]
    back = [f"{across(at):.1f},{up(max(least, low)):.1f}" for at, least, _ in reversed(one.band)]
    return [f'<polygon class="band" style="fill:{colour(one.colour)}" points="{" ".join(there + back)}"/>']


def _curve(one: Series, across: _Scale, up: _Scale) -> list[str]:
    ink, out = colour(one.colour), []
    places = [(f"{across(a):.1f}", f"{up(b):.1f}") for a, b in one.points]
    if one.joined and len(places) > 1:
        kind = "curve" + (" dashed" if one.dashed else "") + (" faint" if one.faint else "")
        joined = " ".join(f"{a},{b}" for a, b in places)
        out.append(f'<polyline class="{kind}" style="stroke:{ink}" points="{joined}"/>')
    if one.dots or not one.joined or len(places) == 1:
        for i, (a, b) in enumerate(places):
            fill = "var(--paper)" if i < len(one.hollow) and one.hollow[i] else ink
            out.append(f'<circle class="dot" cx="{a}" cy="{b}" r="3.6" style="fill:{fill};stroke:{ink}"/>')
    return out


def _note(note: Note, across: _Scale, up: _Scale, width: float) -> str:
    right = across(note.x) + 7 + 6.6 * len(note.text) > width
    x = across(note.x) - 7 if right else across(note.x) + 7
    return text(x, up(note.y) + 4, note.text, anchor="end" if right else "start", kind="small")


def _hover(series: Sequence[Series], across: _Scale, x: Axis, y: Axis, reach: tuple[float, float]) -> list[str]:
    """Transparent columns whose title names the nearest point of each line."""
    every = sorted({a for one in series for a, _ in one.points})
    chosen = every[::max(1, math.ceil(len(every) / HOVER))]
    width = (across.end - across.begin) / max(len(chosen), 1)
    tables = [sorted(one.points) for one in series]
    at = [0] * len(series)
    out = []
    for value in chosen:
        rows = [f"{x.label or 'step'} {value:g}"]
        for i, (one, table) in enumerate(zip(series, tables)):
            while at[i] + 1 < len(table) and abs(table[at[i] + 1][0] - value) <= abs(table[at[i]][0] - value):
                at[i] += 1
            rows.append(f"{one.name}: {y.form(table[at[i]][1])}")
        out.append(f'<rect class="hover" x="{across(value) - width / 2:.1f}" y="{reach[0]:g}" width="{width:.1f}" '
                   f'height="{reach[1] - reach[0]:g}"><title>{escape(chr(10).join(rows))}</title></rect>')
    return out
