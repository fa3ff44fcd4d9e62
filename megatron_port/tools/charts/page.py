"""HTML pages with a style sheet of their own, and pictures that stand alone; light and dark as the reader's system."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from megatron_port.ext.telemetry.numbers import decades, number, ticks

# Series colours: told apart by people with the common colour blindnesses, on both backgrounds.
VARIABLES = {
    "paper": ("#fbfbf9", "#14171b"), "card": ("#fff", "#1b1f24"), "ink": ("#1f2328", "#e6e8eb"),
    "soft": ("#59606a", "#9aa3ad"), "rule": ("#dfe2e6", "#2f353c"), "idle": ("#eceef1", "#262b31"),
    "good": ("#1e7d4f", "#5fd39a"), "bad": ("#b3261e", "#ff8a80"), "heat": ("#1f6f8b", "#4fb3cf"),
    "onheat": ("#fff", "#0d1216"), "total": ("#3b4252", "#aeb6c6"), "c0": ("#1f6feb", "#6cb0ff"),
    "c1": ("#c2410c", "#ff9b6a"), "c2": ("#0f766e", "#4fd1bd"), "c3": ("#9333ea", "#c9a2ff"),
    "c4": ("#a16207", "#e3c04d"), "c5": ("#be185d", "#ff8fc0"), "c6": ("#7a7d85", "#a4a8b2"),
    "c7": ("#4d7c0f", "#a3d65c"),
}
"""Name → colour on a light and on a dark page."""

PICTURE = """
svg text{fill:var(--ink);font:12px system-ui,sans-serif}svg text.axis{fill:var(--soft)}svg text.small{font-size:11px}
svg text.strong{font-weight:600}svg text.onheat{fill:var(--onheat);font-weight:600}svg text.cellmark{font-size:11px}
.grid{stroke:var(--idle)}.foot{stroke:var(--rule)}.rule{stroke:var(--soft);stroke-dasharray:3 3}
.limit{stroke:var(--bad);stroke-width:2;stroke-dasharray:7 4}.hatch{stroke:var(--rule);stroke-width:6}
.cell{stroke:var(--rule)}.frame{stroke:var(--ink)}
.curve{fill:none;stroke-width:1.8;stroke-linejoin:round}.dashed{stroke-dasharray:5 4}.faint{stroke-width:.8;opacity:.5}
.dot{stroke-width:1.6}.band{opacity:.18;stroke:none}
.mark{stroke:var(--soft);stroke-dasharray:2 3}.mark.bad{stroke:var(--bad);stroke-width:1.6;stroke-dasharray:none}
.hover{fill:transparent}.hover:hover{fill:var(--ink);opacity:.06}
""".strip()
"""Classes of the shapes of a picture."""

LAYOUT = """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1200px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:26px;margin:0 0 4px;line-height:1.25}h2{font-size:18px;margin:36px 0 12px}h3{font-size:14px;margin:0 0 6px}
p{margin:4px 0 12px}.soft,section>p{color:var(--soft)}b.good{color:var(--good)}b.bad{color:var(--bad)}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:16px}
.card{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:14px 16px;overflow:hidden}
.tiles{display:grid;grid-template-columns:repeat(4,1fr);gap:12px;margin:18px 0}
@media (max-width:700px){.tiles{grid-template-columns:repeat(2,1fr)}}
.tile b{display:block;font-size:22px;font-weight:600;font-variant-numeric:tabular-nums;line-height:1.3}
.tile span{color:var(--soft);font-size:13px}
svg{display:block;width:100%;height:auto}
.scroll{overflow-x:auto}@media (max-width:700px){.scroll>svg{min-width:640px}}
table{border-collapse:collapse;font-size:14px;width:100%}
th,td{text-align:left;padding:6px 14px 6px 0;border-bottom:1px solid var(--rule);vertical-align:top}
th{font-weight:600;color:var(--soft)}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td.wide{overflow-wrap:anywhere}tr.bad td.kind{color:var(--bad)}
pre{overflow-x:auto;font:13px/1.45 ui-monospace,monospace;margin:0;white-space:pre}
details{margin:10px 0}summary{cursor:pointer;color:var(--soft)}
@media print{.card{break-inside:avoid}}
""".strip()

Cell = str | tuple[str, str]
"""Text, or (text, class)."""


def themes() -> str:
    """The variables for light and dark pages."""
    light, dark = (";".join(f"--{name}:{both[i]}" for name, both in VARIABLES.items()) for i in (0, 1))
    return f":root{{color-scheme:light dark;{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"


def page(title: str, body: str) -> str:
    """A whole document. The policy in its head forbids every request and every script."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n'
        f"<style>{themes()}\n{LAYOUT}\n{PICTURE}</style></head>\n<body><main>\n{body}\n</main></body></html>\n"
    )


def standalone(picture: str, *, themed: bool = False) -> str:
    """Make a file of a drawing (:func:`megatron_port.tools.charts.page.drawing`): its own ground and style sheet.

    ``themed``: light and dark, for browsers; without, light, with plain colours that every viewer of SVG knows.
    """
    head, body = picture.split(">", 1)
    _, _, width, height = re.findall(r"[\d.]+", head.split('viewBox="')[1].split('"')[0])
    made = (
        f'{head} xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"><style>'
        f'{themes() if themed else ""}{PICTURE}</style><rect width="100%" height="100%" style="fill:var(--paper)"/>'
        f"{body}\n"
    )
    if themed:
        return made
    return re.sub(r"var\(--(\w+)\)", lambda found: VARIABLES[found.group(1)][0], made)


def section(title: str, words: str, *bodies: str) -> str:
    """A heading, a sentence, and what follows."""
    return f"<section><h2>{escape(title)}</h2><p>{escape(words)}</p>{''.join(bodies)}</section>"


def columns(parts: Sequence[str]) -> str:
    """Parts beside one another where there is room."""
    return f'<div class="charts">{"".join(parts)}</div>'


def table(head: Sequence[Cell], rows: Sequence[Sequence[Cell]], *, bad: Sequence[bool] = ()) -> str:
    """Rows of text; ``bad`` ones stand out."""
    def cell(tag: str, value: Cell) -> str:
        text, kind = value if isinstance(value, tuple) else (value, "")
        return f"<{tag}{f' class={chr(34)}{kind}{chr(34)}' if kind else ''}>{escape(text)}</{tag}>"

    out = ["<div class=\"scroll\"><table>"]
    if head:
        out.append("<thead><tr>" + "".join(cell("th", h) for h in head) + "</tr></thead>")
    out.append("<tbody>")
    for i, row in enumerate(rows):
        mark = ' class="bad"' if i < len(bad) and bad[i] else ""
        out.append(f"<tr{mark}>" + "".join(cell("td", c) for c in row) + "</tr>")
    return "".join(out) + "</tbody></table></div>"


def card(title: str, content: str, note: str = "") -> str:
    """A chart with its heading; nothing where there is no content."""
    if not content:
        return ""
    below = f'<p class="soft">{escape(note)}</p>' if note else ""
    return f'<section class="card"><h3>{escape(title)}</h3>{content}{below}</section>'


def fold(title: str, content: str) -> str:
    """Content that is opened by a click."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


# The shapes that every picture is made of. Colours are variables of the page's style sheet.

COLOURS = 8
"""Series colours of the style sheet: ``var(--c0)`` to ``var(--c7)``."""


def colour(index: int) -> str:
    """The CSS colour of a series."""
    return f"var(--c{index % COLOURS})"


def text(x: float, y: float, words: str, *, anchor: str = "start", kind: str = "", rotate: float = 0.0) -> str:
    """A line of text; ``kind``: class of the style sheet (``small``, ``strong``, ``axis``)."""
    turn = f' transform="rotate({rotate:g} {x:.1f} {y:.1f})"' if rotate else ""
    name = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{name}{turn}>{escape(words)}</text>'


def rectangle(x: float, y: float, width: float, height: float, fill: str, *, title: str = "", more: str = "") -> str:
    """A rectangle; ``title``: shown when pointed at; ``more``: further attributes."""
    head = f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0):.2f}" height="{max(height, 0):.2f}" '
    head += f'style="fill:{fill}"{" " + more if more else ""}'
    return f"{head}><title>{escape(title)}</title></rect>" if title else f"{head}/>"


def line(x1: float, y1: float, x2: float, y2: float, kind: str = "grid", *, title: str = "") -> str:
    """A straight line of a class of the style sheet; ``title``: shown when pointed at."""
    head = f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"'
    return f"{head}><title>{escape(title)}</title></line>" if title else f"{head}/>"


def drawing(width: float, height: float, parts: Sequence[str], label: str) -> str:
    """An <svg> that scales with its column; ``label``: for readers who do not see it."""
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label, quote=True)}" '
        f'style="max-width:{width:g}px">' + "".join(parts) + "</svg>"
    )


def legend(x: float, y: float, names: Sequence[tuple[str, str]], width: float) -> tuple[str, float]:
    """Swatches (name, CSS colour) in rows of at most ``width``; return the SVG and its height."""
    out, at, row = [], x, y
    for name, fill in names:
        need = 22 + 6.6 * len(name)
        if at > x and at + need > x + width:
            at, row = x, row + 18
        out.append(rectangle(at, row - 9, 11, 11, fill, more='rx="2"') + text(at + 16, row, name, kind="small"))
        at += need
    return "".join(out), row - y + 18


# Heat maps: a cell for each row and column, coloured by level. Neighbours of a level are one stroke of a path.

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


# Gantt charts: a row for each worker, a bar for each piece of its work.

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


# Line charts: curves, bands and points over an axis that is linear, of octaves or of decades.

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
