"""The frame of the HTML report: one file, no network, light and dark as the reader's system asks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

# Series colours: told apart by people with the common colour blindnesses, on both backgrounds.
STYLE = """
:root{color-scheme:light dark;--bg:#fbfbf9;--card:#fff;--ink:#1f2328;--soft:#59606a;--line:#dfe2e6;--grid:#eceef1;
--bad:#b3261e;--c1:#1f6feb;--c2:#c2410c;--c3:#0f766e;--c4:#9333ea;--c5:#a16207;--c6:#be185d}
@media (prefers-color-scheme:dark){:root{--bg:#14171b;--card:#1b1f24;--ink:#e6e8eb;--soft:#9aa3ad;--line:#2f353c;
--grid:#262b31;--bad:#ff8a80;--c1:#6cb0ff;--c2:#ff9b6a;--c3:#4fd1bd;--c4:#c9a2ff;--c5:#e3c04d;--c6:#ff8fc0}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1200px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:26px;margin:0 0 4px;line-height:1.25}h2{font-size:18px;margin:36px 0 12px}h3{font-size:14px;margin:0 0 6px}
p{margin:4px 0 12px}.soft{color:var(--soft)}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:16px}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:14px 16px;overflow:hidden}
.tiles{display:grid;grid-template-columns:repeat(4,1fr);gap:12px;margin:18px 0}
@media (max-width:700px){.tiles{grid-template-columns:repeat(2,1fr)}}
.tile b{display:block;font-size:22px;font-weight:600;font-variant-numeric:tabular-nums;line-height:1.3}
.tile span{color:var(--soft);font-size:13px}
svg{display:block;width:100%;height:auto}
.grid{stroke:var(--grid)}.axis{stroke:var(--line)}.tick{fill:var(--soft);font-size:12px}
.line{fill:none;stroke-width:1.8;stroke-linejoin:round}.dashed{stroke-dasharray:5 4}
.band{opacity:.18;stroke:none}.mark{stroke:var(--soft);stroke-dasharray:2 3}.mark.bad{stroke:var(--bad)}
.hover{fill:transparent}.hover:hover{fill:var(--ink);opacity:.06}
.line.c1{stroke:var(--c1)}.line.c2{stroke:var(--c2)}.line.c3{stroke:var(--c3)}.line.c4{stroke:var(--c4)}
.line.c5{stroke:var(--c5)}.line.c6{stroke:var(--c6)}
.band.c1,.dot.c1{fill:var(--c1)}.band.c2,.dot.c2{fill:var(--c2)}.band.c3,.dot.c3{fill:var(--c3)}
.band.c4,.dot.c4{fill:var(--c4)}.band.c5,.dot.c5{fill:var(--c5)}.band.c6,.dot.c6{fill:var(--c6)}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;font-size:13px;color:var(--soft);margin:2px 0 6px}
.key{display:inline-block;width:16px;height:3px;border-radius:2px;margin-right:6px;vertical-align:middle}
.key.c1{background:var(--c1)}.key.c2{background:var(--c2)}.key.c3{background:var(--c3)}.key.c4{background:var(--c4)}
.key.c5{background:var(--c5)}.key.c6{background:var(--c6)}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:14px;width:100%}
th,td{text-align:left;padding:6px 14px 6px 0;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:600;color:var(--soft)}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td.wide{overflow-wrap:anywhere}tr.bad td.kind{color:var(--bad)}
pre{overflow-x:auto;font:13px/1.45 ui-monospace,monospace;margin:0;white-space:pre}
details{margin:10px 0}summary{cursor:pointer;color:var(--soft)}
@media print{.card{break-inside:avoid}}
""".strip()

Cell = str | tuple[str, str]
"""Text, or (text, class)."""


def page(title: str, body: str) -> str:
    """A whole document. The policy in its head forbids every request and every script."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n<style>{STYLE}</style></head>\n'
        f"<body><main>\n{body}\n</main></body></html>\n"
    )


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


def legend(names: Sequence[tuple[str, int]]) -> str:
    """Name and colour of each series; nothing for a single one."""
    if len(names) < 2:
        return ""
    keys = "".join(f'<span><i class="key c{colour}"></i>{escape(name)}</span>' for name, colour in names)
    return f'<div class="legend">{keys}</div>'


def card(title: str, content: str, note: str = "") -> str:
    """A chart with its heading; nothing where there is no content."""
    if not content:
        return ""
    below = f'<p class="soft">{escape(note)}</p>' if note else ""
    return f'<section class="card"><h3>{escape(title)}</h3>{content}{below}</section>'


def fold(title: str, content: str) -> str:
    """Content that is opened by a click."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>"
