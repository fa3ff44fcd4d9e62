"""The part of the live page about ranks: what each is doing, and where the time of a step goes."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from megatron_port.core.dist.progress import PHASES
from megatron_port.core.io.numbers import number
from megatron_port.core.io.regular import read_regular
from megatron_port.core.io.typed_json import WrongContent, parse_json
from megatron_port.tools.charts.gantt import Bar, gantt
from megatron_port.tools.charts.page import Cell, card, columns, table
from megatron_port.tools.charts.shapes import colour, drawing, legend

LEFT, WIDTH, EACH = 64.0, 720.0, 20.0
STALE_S = 30.0
"""Heartbeats that are older are said to be old."""
_WORDS = ("host", "coords", "scope", "doing")
_NUMBERS = ("rank", "step", "idle_seconds", "seconds_per_step")
_BYTES = 1 << 20


def read_now(path: Path) -> dict[str, Any]:
    """Return now.json; empty where there is none, or something that no run writes."""
    try:
        value = parse_json(read_regular(path, _BYTES))
    except (OSError, WrongContent):
        return {}
    if not isinstance(value, dict) or not all(_count(value.get(name)) for name in ("time", "world", "connected")):
        return {}
    ranks = value.get("ranks")
    value["ranks"] = [r for r in ranks if _is_rank(r)] if isinstance(ranks, list) else []
    doing = value.get("doing")
    value["doing"] = {str(k): v for k, v in doing.items() if _count(v)} if isinstance(doing, dict) else {}
    value["phase_seconds"] = _phases(value.get("phase_seconds"))
    return value


def _count(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and 0 <= value < 1e15


def _is_rank(value: Any) -> bool:
    if not isinstance(value, dict) or not all(_count(value.get(name)) for name in _NUMBERS):
        return False
    value["phase_seconds"] = _phases(value.get("phase_seconds"))
    return all(isinstance(value.get(name), str) for name in _WORDS)


def _phases(value: Any) -> dict[str, float]:
    """Return seconds by phase, of those that a run has."""
    given = value if isinstance(value, dict) else {}
    return {name: float(given[name]) for name in PHASES if _count(given.get(name))}


def ranks_part(now: dict[str, Any]) -> str:
    """Return what the ranks do, as HTML; empty: nothing is known."""
    if not now:
        return ""
    age = time.time() - float(now["time"])
    old = f" As of {age:,.0f} s ago." if age > STALE_S else ""
    doing = ", ".join(f"{int(count)} in {what}" for what, count in now["doing"].items())
    note = f"{int(now['connected'])} of {int(now['world'])} ranks are connected: {doing or 'nothing known'}.{old}"
    parts = [card("What the ranks are doing", _table(now["ranks"]), note)]
    drawn = _picture(now)
    if drawn:
        parts.insert(0, card("Seconds per step, by phase", drawn, "Mean of the steps of this start. Transfer and "
                             "reduce are waits for other ranks."))
    return columns(parts)


def _table(ranks: list[dict[str, Any]]) -> str:
    head: list[Cell] = [("rank", "n"), "host", "place", ("step", "n"), "doing", ("no progress for (s)", "n")]
    rows: list[list[Cell]] = [
        [(str(int(r["rank"])), "n"), (r["host"], "wide"), r["coords"], (f"{int(r['step']):,}", "n"),
         (f"{r['scope']}: {r['doing']}" + (" (silent)" if r.get("silent") else ""), "wide"),
         (f"{r['idle_seconds']:.1f}", "n")]
        for r in ranks
    ]
    return table(head, rows, bad=[bool(r.get("silent")) for r in ranks]) if rows else ""


def _picture(now: dict[str, Any]) -> str:
    """Draw a bar for each rank, divided by phase; of many ranks the mean alone."""
    rows = [(f"rank {int(r['rank'])}", r["phase_seconds"]) for r in now["ranks"] if any(r["phase_seconds"].values())]
    if len(rows) > 32 or not rows:
        rows = [("mean", now["phase_seconds"])] if any(now["phase_seconds"].values()) else []
    if not rows:
        return ""
    longest = max(sum(phases.values()) for _, phases in rows)
    bars = []
    for name, phases in rows:
        at, row = 0.0, []
        for i, phase in enumerate(PHASES):
            seconds = phases.get(phase, 0.0)
            if seconds > 0:
                row.append(Bar(at, at + seconds, colour(i), title=f"{name}: {phase} {number(seconds)} s"))
                at += seconds
        bars.append(row)
    drawn = gantt(bars, left=LEFT, top=6, scale=(WIDTH - LEFT - 8) / longest, each=EACH, span=longest,
                  names=[name for name, _ in rows])
    foot = 6 + EACH * len(rows)
    swatches, more = legend(LEFT, foot + 18, [(phase, colour(i)) for i, phase in enumerate(PHASES)], WIDTH - LEFT)
    return drawing(WIDTH, foot + 12 + more, [*drawn, swatches], "seconds per step by phase and rank")
