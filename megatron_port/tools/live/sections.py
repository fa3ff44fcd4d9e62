"""The parts of the live page, each as HTML that the page's script puts in the place of the one before."""

from __future__ import annotations

import time
from html import escape

from megatron_port.ext.telemetry.console import duration
from megatron_port.ext.telemetry.run_state import FAILED, FINISHED, RUNNING
from megatron_port.tools.charts.page import LAYOUT, PICTURE, columns, themes
from megatron_port.tools.live.follow import FollowedRun
from megatron_port.tools.live.ranks import ranks_part
from megatron_port.tools.report.run_report import charts, event_table, rank_spread, tiles

SECTIONS = ("head", "tiles", "charts", "experts", "ranks", "spread", "events")
_STYLE = """
.bar{height:6px;border-radius:3px;background:var(--idle);margin:10px 0 4px;overflow:hidden}
.bar i{display:block;height:100%;background:var(--c0)}
.state{font-weight:600}.state.running{color:var(--good)}.state.failed{color:var(--bad)}
#link{position:fixed;right:12px;bottom:12px;background:var(--card);border:1px solid var(--rule);border-radius:8px;
padding:4px 10px;font-size:13px;color:var(--soft)}#link.bad{color:var(--bad);border-color:var(--bad)}
main>div:empty{display:none}#ranks td{white-space:nowrap}#spread{margin-top:16px}
""".strip()


def sections(run: FollowedRun) -> dict[str, str]:
    """Return the HTML of every section by its name; empty where there is nothing to show."""
    data = run.data
    stepped = bool(data.series["loss"].buckets or data.validation)
    return {
        "head": _head(run),
        "tiles": tiles(data) if data.facts else "",
        "charts": f"<h2>Training</h2>{charts([data])}" if stepped else
                  '<p class="soft">No step has been recorded yet.</p>',
        "experts": f"<h2>Experts</h2>{run.experts}" if run.experts else "",
        "ranks": f"<h2>Ranks</h2>{ranks_part(run.now)}" if run.now else "",
        "spread": columns([rank_spread(data)]) if data.spread else "",
        "events": f"<h2>Events</h2>{event_table([data])}",
    }


def _head(run: FollowedRun) -> str:
    state = run.state
    words = [f'<span class="state {state.status}">{escape(state.status)}</span>']
    if state.why:
        words.append(escape(state.why))
    share = 0.0
    if state.steps:
        share = min(state.step / state.steps, 1.0)
        words.append(f"step {state.step:,} of {state.steps:,}")
    left = _left(run)
    if left is not None and state.status == RUNNING:
        words.append(f"{duration(left)} to go")
    env = run.data.environment
    words += [escape(str(env[name])) for name in ("layout", "device", "host") if name in env]
    if state.time and state.status not in (FINISHED, FAILED):
        words.append(f"last line {max(time.time() - state.time, 0):,.0f} s ago")
    bar = f'<div class="bar"><i style="width:{100 * share:.2f}%"></i></div>' if state.steps else ""
    return f'<h1>{escape(run.data.name)}</h1>{bar}<p class="soft">{" · ".join(words)}</p>'


def _left(run: FollowedRun) -> float | None:
    """Return the seconds until the last step, by the mean of the latest ones."""
    buckets = run.data.series["seconds"].buckets[-20:]
    count = sum(b.count for b in buckets)
    if not count or not run.state.steps:
        return None
    return (run.state.steps - run.state.step) * sum(b.total for b in buckets) / count


def document(run: FollowedRun) -> str:
    """Return the whole page, which is readable without its script too."""
    parts = sections(run)
    body = "\n".join(f'<div id="{name}">{parts[name]}</div>' for name in SECTIONS)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(run.data.name)}</title>\n'
        f"<style>{themes()}\n{LAYOUT}\n{PICTURE}\n{_STYLE}</style>\n"
        '<script src="live.js" defer></script></head>\n'
        f'<body><main>\n{body}\n</main><div id="link" role="status">not live: scripts are off</div></body></html>\n'
    )
