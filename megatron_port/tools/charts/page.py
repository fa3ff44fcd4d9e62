"""HTML pages with a style sheet of their own, and pictures that stand alone; light and dark as the reader's system."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

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
    """Make a file of a drawing (:func:`megatron_port.tools.charts.shapes.drawing`): its own ground and style sheet.

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
