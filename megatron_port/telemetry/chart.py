"""Line charts as inline SVG: no script, no font, no network; colours come from the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

from megatron_port.telemetry.text import quantity

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 34
HOVER = 120
"""Columns that show their values under the pointer."""


@dataclass
class Line:
    """One curve of a chart."""

    name: str
    points: list[tuple[float, float]]
    colour: int = 1
    """Which of the page's series colours."""
    band: list[tuple[float, float, float]] = field(default_factory=list)
    """(x, low, high): drawn behind the curve."""
    dots: bool = False
    """Points instead of a line."""
    dashed: bool = False


@dataclass(frozen=True)
class Mark:
    """A vertical line."""

    x: float
    text: str
    bad: bool = False


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers within [low, high]."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    unit = 10 ** math.floor(math.log10(raw))
    step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten within [low, high] (exponents); thinned where there are many."""
    first, last = math.ceil(low - 1e-9), math.floor(high + 1e-9)
    return [float(e) for e in range(first, last + 1, max(1, (last - first) // 5))]


@dataclass
class _Scale:
    """Values to pixels."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        at = math.log10(max(value, 1e-300)) if self.log else value
        return self.begin + (at - self.low) / (self.high - self.low) * (self.end - self.begin)


def number(value: float) -> str:
    """A tick or a value, short."""
    if value == 0:
        return "0"
    if 0.001 <= abs(value) < 10_000:
        return f"{value:.4g}"
    return quantity(float(value)) if abs(value) >= 10_000 else f"{value:.1e}"


def draw(lines: Sequence[Line], *, label: str, form: Callable[[float], str] = number, marks: Sequence[Mark] = (),
         zero: bool = False) -> str:
    """A chart over steps. ``label``: what screen readers are told; ``zero``: the axis begins at 0. Empty: no points."""
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    x_scale = _x_scale(min(xs), max(xs))
    y_scale = _y_scale(ys, zero)
    frame = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'
    out = [frame, _axes(x_scale, y_scale, form)]
    for mark in marks:
        if x_scale.low <= mark.x <= x_scale.high:
            at = f"{x_scale(mark.x):.1f}"
            out.append(f'<line class="{"mark bad" if mark.bad else "mark"}" x1="{at}" x2="{at}" y1="{TOP}" '
                       f'y2="{HEIGHT - BOTTOM}"><title>{escape(mark.text)}</title></line>')
    for line in lines:
        out += _band(line, x_scale, y_scale)
    for line in lines:
        out += _curve(line, x_scale, y_scale)
    out += _hover(lines, x_scale, form)
    return "".join(out) + "</svg>"


def _x_scale(low: float, high: float) -> _Scale:
    if high <= low:
        low, high = low - 0.5, high + 0.5
    return _Scale(low, high, LEFT, WIDTH - RIGHT)


def _y_scale(ys: Sequence[float], zero: bool) -> _Scale:
    low, high = min(ys), max(ys)
    if low > 0 and high / low > 100 and not zero:
        a, b = math.log10(low), math.log10(high)
        return _Scale(a - 0.03 * (b - a), b + 0.03 * (b - a), HEIGHT - BOTTOM, TOP, log=True)
    if zero and low >= 0:
        low = 0.0
    if high <= low:
        pad = abs(high) * 0.1 or 1.0
        low, high = low - (0 if zero and low == 0 else pad), high + pad
    pad = 0.05 * (high - low)
    return _Scale(low if zero and low == 0 else low - pad, high + pad, HEIGHT - BOTTOM, TOP)


def _axes(x: _Scale, y: _Scale, form: Callable[[float], str]) -> str:
    out = []
    for value in _log_ticks(y.low, y.high) if y.log else ticks(y.low, y.high):
        shown = 10**value if y.log else value
        at = f"{y(shown):.1f}"
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>'
                   f'<text class="tick" x="{LEFT - 8}" y="{at}" text-anchor="end" dy="0.32em">'
                   f"{escape(form(shown))}</text>")
    for value in ticks(x.low, x.high, 6):
        if value == round(value):
            out.append(f'<text class="tick" x="{x(value):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">'
                       f"{escape(number(value))}</text>")
    out.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>')
    return "".join(out)


def _band(line: Line, x: _Scale, y: _Scale) -> list[str]:
    if len(line.band) < 2:
        return []
    low, high = (10**y.low, 10**y.high) if y.log else (y.low, y.high)
    there = [f"{x(at):.1f},{y(min(most, high)):.1f}" for at, _, most in line.band]
    back = [f"{x(at):.1f},{y(max(least, low)):.1f}" for at, least, _ in reversed(line.band)]
    return [f'<polygon class="band c{line.colour}" points="{" ".join(there + back)}"/>']


def _curve(line: Line, x: _Scale, y: _Scale) -> list[str]:
    if line.dots or len(line.points) == 1:
        return [f'<circle class="dot c{line.colour}" cx="{x(a):.1f}" cy="{y(b):.1f}" r="4"/>' for a, b in line.points]
    points = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in line.points)
    return [f'<polyline class="line c{line.colour}{" dashed" if line.dashed else ""}" points="{points}"/>']


def _hover(lines: Sequence[Line], x: _Scale, form: Callable[[float], str]) -> list[str]:
    """Transparent columns whose title names the nearest point of each line."""
    every = sorted({a for line in lines for a, _ in line.points})
    chosen = every[::max(1, math.ceil(len(every) / HOVER))]
    width = (WIDTH - LEFT - RIGHT) / max(len(chosen), 1)
    tables = [sorted(line.points) for line in lines]
    at = [0] * len(lines)
    out = []
    for step in chosen:
        rows = [f"step {step:g}"]
        for i, (line, table) in enumerate(zip(lines, tables)):
            while at[i] + 1 < len(table) and abs(table[at[i] + 1][0] - step) <= abs(table[at[i]][0] - step):
                at[i] += 1
            rows.append(f"{line.name}: {form(table[at[i]][1])}")
        out.append(f'<rect class="hover" x="{x(step) - width / 2:.1f}" y="{TOP}" width="{width:.1f}" '
                   f'height="{HEIGHT - TOP - BOTTOM}"><title>{escape(chr(10).join(rows))}</title></rect>')
    return out
