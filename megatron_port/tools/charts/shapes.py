"""The shapes that every picture is made of. Colours are variables of the page's style sheet."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

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
