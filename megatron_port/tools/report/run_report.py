"""One self-contained HTML file about one or several runs. docs/report.md says what every figure is."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from megatron_port.ext.telemetry.expert_file import FILE_NAME, LOW, LayerCounts, read_rows
from megatron_port.ext.telemetry.numbers import formatted, number, ticks
from megatron_port.ext.telemetry.run_facts import FACTS, TILES, facts_of
from megatron_port.ext.telemetry.step_metrics import CHARTS, LOSS, Metric
from megatron_port.tools.charts.page import (
    Axis,
    Cell,
    Mark,
    card,
    columns,
    drawing,
    fold,
    heat_map,
    legend,
    line_chart,
    page,
    row_names,
    table,
    text,
)
from megatron_port.tools.charts.page import Series as Curve
from megatron_port.tools.report.run_data import RunData, Series

# The part of a report about experts: a map of their load over the steps for each layer, and the last window's numbers.
#
# docs/report.md describes it.

COLUMNS = 96
"""Most columns of a map; beyond, neighbouring rows of the file are joined."""
CELLS = 1_500_000
"""Cells of all maps together; beyond, only the layers of the most uneven load have one."""
LEVELS = (0.1, 0.25, 0.5, 0.8, 1.25, 2.0, 4.0)
"""Loads, over the mean, between which colours change."""
FILLS = (
    "var(--bad)", "var(--c0)", "color-mix(in srgb, var(--c0) 60%, var(--paper))",
    "color-mix(in srgb, var(--c0) 25%, var(--paper))", "var(--idle)",
    "color-mix(in srgb, var(--c1) 35%, var(--paper))", "color-mix(in srgb, var(--c1) 70%, var(--paper))", "var(--c1)",
)
LEFT, TOP, WIDTH = 44.0, 8.0, 480.0
OPEN = 4
"""Maps that are shown without a click."""


@dataclass
class ExpertHistory:
    """Counts by window of steps, at most ``COLUMNS`` of them."""

    windows: list[tuple[int, int, LayerCounts]] = field(default_factory=list)
    """(first step, last step, sums)"""
    width: int = 1
    """Steps that windows are joined up to."""

    def add(self, step: int, steps: int, counts: LayerCounts) -> None:
        """Add a row of experts.jsonl; rows come in the order of their steps."""
        self.windows.append((max(step - steps + 1, 1), step, counts))
        while len(self.windows) > COLUMNS:
            self.width *= 2
            joined: list[tuple[int, int, LayerCounts]] = []
            for first, last, sums in self.windows:
                if joined and (joined[-1][1] - 1) // self.width == (last - 1) // self.width:
                    joined[-1] = joined[-1][0], last, joined[-1][2].plus(sums)
                else:
                    joined.append((first, last, sums))
            self.windows = joined


def read_history(run: RunData) -> ExpertHistory:
    """Return what the run's experts.jsonl holds; empty without one."""
    history, path = ExpertHistory(), Path(run.folder) / FILE_NAME
    try:
        for step, steps, counts in read_rows(path, lambda: run.leave_out(FILE_NAME)):
            if not history.windows or step > history.windows[-1][1]:
                history.add(step, steps, counts)
    except OSError:
        pass
    return history


def expert_part(run: RunData, history: ExpertHistory) -> str:
    """Return the maps and the table of a run; empty where it has no experts."""
    if not history.windows:
        return ""
    last = history.windows[-1][2]
    shown = _shown(last, len(history.windows))
    maps = [card(f"{run.name}: layer {last.layers[i]}", layer_map(history, i)) for i in shown]
    left = len(last.layers) - len(shown)
    words = (
        "Load of each expert (rows) over the steps, as a multiple of its layer's mean; tokens before any is dropped."
        + (f" The {len(shown)} layers of the most uneven load are drawn, {left} are not." if left else "")
    )
    more = fold(f"{len(maps) - OPEN} layers more", columns(maps[OPEN:])) if len(maps) > OPEN else ""
    return f'<p class="soft">{words}</p>{columns(maps[:OPEN])}{more}{_table(run, history.windows[-1])}'


def _shown(last: LayerCounts, windows: int) -> list[int]:
    """Return the layers that are drawn, by their place, in order."""
    room = max(1, CELLS // (windows * last.tokens.shape[1]))
    uneven = np.argsort(-last.load.max(axis=1), kind="stable")[:room]
    return sorted(int(i) for i in uneven)


def layer_map(history: ExpertHistory, layer: int) -> str:
    """Draw the load of one layer's experts, by its place among the layers that have experts."""
    loads = np.stack([sums.load[layer] for _, _, sums in history.windows], axis=1)
    levels = np.digitize(loads, LEVELS).tolist()
    experts = len(levels)
    height = experts * max(1.0, min(14.0, 224.0 / experts))
    out = heat_map(levels, FILLS, left=LEFT, top=TOP, width=WIDTH, height=height)
    out += row_names([str(e) for e in range(experts)], left=LEFT, top=TOP, height=height)
    out += _steps(history, TOP + height + 16)
    names = [f"below {LEVELS[0]:g}", *(f"to {level:g}" for level in LEVELS[1:]), f"above {LEVELS[-1]:g}"]
    swatches, foot = legend(LEFT, TOP + height + 40, list(zip(names, FILLS)), WIDTH)
    label = f"load of the experts of layer {history.windows[-1][2].layers[layer]} by step"
    return drawing(LEFT + WIDTH + 16, TOP + height + 30 + foot, [*out, swatches], label)


def _steps(history: ExpertHistory, y: float) -> list[str]:
    """Write round steps below the columns that hold them."""
    wide, out = WIDTH / len(history.windows), []
    for value in ticks(history.windows[0][0], history.windows[-1][1], 6):
        at = next((i for i, (_, last, _) in enumerate(history.windows) if last >= value), None)
        if at is not None and value == round(value):
            out.append(text(LEFT + (at + 0.5) * wide, y, f"{value:g}", anchor="middle", kind="axis"))
    return out


def _table(run: RunData, window: tuple[int, int, LayerCounts]) -> str:
    first, last, counts = window
    load = counts.load
    low = (load < LOW).sum(axis=1)
    head: list[Cell] = [f"steps {first} to {last}", *[(name, "n") for name in (
        "most loaded expert", "of the mean", "least loaded", "of the mean", f"below {100 * LOW:g} % of it", "dropped",
        "margin")]]
    rows: list[Sequence[Cell]] = []
    for i, layer in enumerate(counts.layers):
        most, least = int(load[i].argmax()), int(load[i].argmin())
        cells = [str(most), f"{load[i, most]:.3g}", str(least), f"{load[i, least]:.3g}", str(int(low[i]))]
        sums = counts.sums
        cells.append(f"{100 * sums['dropped'][i] / counts.tokens[i].sum():.2f} %" if "dropped" in sums else "")
        cells.append(f"{counts.mean('margin')[i]:.3g}" if "margin" in sums else "")
        rows.append([f"layer {layer}", *((cell, "n") for cell in cells)])
    return card(f"{run.name}: load of experts in the last window", table(head, rows, bad=[bool(n) for n in low]))


MOST_EVENT_ROWS = 200
BAD_EVENTS = ("failed", "anomaly", "rewind", "straggler")


@dataclass(frozen=True)
class Comparison:
    """One number that was predicted for a run, and what the run measured."""

    label: str
    predicted: float | None
    measured: float | None
    unit: str = ""


def render(runs: Sequence[RunData], *, comparisons: Mapping[str, Sequence[Comparison]] | None = None) -> str:
    """The report as HTML.

    ``comparisons``: predicted and measured numbers by run name; a run without any has no such section.
    """
    runs = _named_apart(runs)
    experts = "".join(expert_part(run, read_history(run)) for run in runs)  # before the note on lines left out
    title = " against ".join(r.name for r in runs) if len(runs) < 4 else f"{len(runs)} runs"
    parts = [_head(title, runs), tiles(runs[0]) if len(runs) == 1 else "", "<h2>Training</h2>", charts(runs)]
    if experts:
        parts += ["<h2>Experts</h2>", experts]
    spread = [rank_spread(run) for run in runs if run.spread]
    if spread:
        parts += ["<h2>Ranks</h2>", columns(spread)]
    parts += ["<h2>Numbers</h2>", _facts(runs)]
    predicted = _comparisons(runs, comparisons or {})
    if predicted:
        parts += ["<h2>Predicted and measured</h2>", predicted]
    parts += ["<h2>Events</h2>", event_table(runs), "<h2>Configuration</h2>", _configuration(runs),
              "<h2>Environment</h2>", _environment(runs)]
    return page(title, "\n".join(p for p in parts if p))


def _named_apart(runs: Sequence[RunData]) -> list[RunData]:
    names = [r.name for r in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = str(run.folder)
    return list(runs)


def _head(title: str, runs: Sequence[RunData]) -> str:
    one = runs[0]
    what = []
    if len(runs) == 1:
        env = one.environment
        what = [str(env[k]) for k in ("layout", "device", "host") if k in env]
        if "ranks" in env:
            what.insert(0, f"{env['ranks']} rank{'' if env['ranks'] == 1 else 's'}")
        if one.config.get("engine"):
            what.append(f"engine {one.config['engine']}")
        if one.config.get("precision.dtype"):
            what.append(str(one.config["precision.dtype"]))
        if env.get("commit"):
            what.append(f"commit {str(env['commit'])[:12]}{'+' if str(env['commit']).endswith('+') else ''}")
        if one.outcome.get("status"):
            what.append(f"{one.outcome['status']} at step {one.outcome.get('step', '?')}")
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    left = "".join(f'<p class="soft">{escape(f"{r.name}: {r.note()}.")}</p>' for r in runs if r.left_out)
    return (f"<h1>{escape(title)}</h1><p class=\"soft\">{escape(' · '.join(what))}{' · ' if what else ''}"
            f"report made {made}</p>{left}")


def tiles(run: RunData) -> str:
    """The few numbers of a run that are read first."""
    known = {fact.name: fact for fact in FACTS}
    found = [(known[name].label, known[name].text(run.facts[name])) for name in TILES if name in run.facts]
    cards = "".join(f'<div class="card tile"><b>{escape(value)}</b><span>{escape(label)}</span></div>'
                    for label, value in found)
    return f'<div class="tiles">{cards}</div>'


def _line(series: Series, name: str, colour: int, *, factor: float = 1.0, dashed: bool = False) -> Curve:
    points = [(b.step, b.mean * factor) for b in series.buckets]
    band = [(b.step, b.least * factor, b.most * factor) for b in series.buckets] if series.width > 1 else []
    return Curve(name, points, colour, band, dashed=dashed)


def charts(runs: Sequence[RunData]) -> str:
    """Curves over the steps, of all runs in one chart each: the package's own, then those that plugins declared."""
    drawn: dict[str, list[Metric]] = {chart.title: [] for chart in CHARTS}
    for metric in {name: metric for run in runs for name, metric in run.metrics.items()}.values():
        if metric.drawn is not None:
            drawn.setdefault(metric.drawn.title, []).append(metric)
    return columns([_chart(runs, metrics) for metrics in drawn.values()])


def _chart(runs: Sequence[RunData], metrics: Sequence[Metric]) -> str:
    """Return one chart; empty where its values would say nothing."""
    chart, lines = metrics[0].drawn, _curves(runs, metrics)
    assert chart is not None
    values = [{b.mean for b in run.series[m.name].buckets} for run in runs for m in metrics if m.name in run.series]
    if chart.varies and all(len(found) <= 1 for found in values):
        return ""
    marks: Sequence[Mark] = ()
    note = ""
    if chart == LOSS:
        lines, marks, note = lines + _validation(runs), _marks(runs), _note(runs)
    form = (lambda value: formatted(float(value), chart.form)) if chart.form else number
    axis = Axis(form=form, least=0.0 if chart.zero else None)
    return card(chart.title, line_chart(lines, label=chart.title, y=axis, marks=marks), note)


def _curves(runs: Sequence[RunData], metrics: Sequence[Metric]) -> list[Curve]:
    """Return the lines of a chart; of several metrics of a run those that differ from the first."""
    out, several = [], len(runs) > 1
    for i, run in enumerate(runs):
        first = run.series.get(metrics[0].name, Series())
        for k, metric in enumerate(metrics):
            series = run.series.get(metric.name, Series())
            if k and series.mean == first.mean:
                continue
            name = f"{run.name} {metric.curve}".strip() if several else metric.curve or metric.name.replace("_", " ")
            colour = i if several else k + 1 if k else i
            out.append(_line(series, name, colour, factor=metric.factor, dashed=several and k > 0))
    return out


def _validation(runs: Sequence[RunData]) -> list[Curve]:
    several = len(runs) > 1
    return [Curve(f"{r.name} validation" if several else "validation", [(float(s), v) for s, v in r.validation],
                  i if several else 1, joined=False) for i, r in enumerate(runs)]


def _note(runs: Sequence[RunData]) -> str:
    """Return what the chart of the loss has to explain."""
    bad = sum(r.series["grad_norm"].lost + r.series["loss"].lost for r in runs)
    wide = max(r.series["loss"].width for r in runs)
    smooth = f"Mean of {wide} steps; the band is their least and most. " if wide > 1 else ""
    return smooth + (f"{bad} values were not finite." if bad else "")


def _marks(runs: Sequence[RunData]) -> list[Mark]:
    if len(runs) > 1:
        return []
    return [Mark(float(e["step"]), _told(e), e["event"] in BAD_EVENTS) for e in runs[0].events
            if e.get("event") in ("start", "failed", "anomaly", "rewind")
            and isinstance(e.get("step"), int) and e["step"]]


def rank_spread(run: RunData) -> str:
    """Own seconds per step of all ranks, window by window."""
    def points(name: str) -> list[tuple[float, float]]:
        return [(float(w["step"]), float(w[name])) for w in run.spread if isinstance(w.get(name), (int, float))]

    band = [(float(w["step"]), float(w["least"]), float(w["most"])) for w in run.spread if "least" in w and "most" in w]
    lines = [Curve("median", points("median"), 0, band), Curve("slowest", points("most"), 1),
             Curve("fastest", points("least"), 2)]
    drawn = line_chart(lines, label="own seconds per step by rank", y=Axis(least=0.0))
    last = run.spread[-1]
    named = last.get("own_seconds") or last.get("slowest") or {}
    rows: list[list[Cell]] = [[f"rank {rank}", (f"{seconds:.4g}", "n")]
                              for rank, seconds in sorted(named.items(), key=lambda kv: -float(kv[1]))[:16]]
    listed = table(["last window", ("own seconds per step", "n")], rows)
    note = ("A rank's own work: reading samples, forward and backward passes; waits for other ranks are left out. "
            f"{last.get('ranks', '?')} ranks, {len(run.spread)} windows.")
    return (card(f"{run.name}: own seconds per step, by rank", drawn, note)
            + card(f"{run.name}: slowest ranks", listed))


def _facts(runs: Sequence[RunData]) -> str:
    rows: list[list[Cell]] = []
    for fact in facts_of({name: metric for run in runs for name, metric in run.metrics.items()}):
        if any(fact.name in r.facts for r in runs):
            shown = [fact.text(r.facts[fact.name]) if fact.name in r.facts else "" for r in runs]
            rows.append([fact.label, *[(text, "n") for text in shown]])
    return table(["", *[(r.name, "n") for r in runs]], rows)


def _comparisons(runs: Sequence[RunData], given: Mapping[str, Sequence[Comparison]]) -> str:
    out = []
    for run in runs:
        rows: list[list[Cell]] = []
        for c in given.get(run.name, ()):
            ratio = f"{c.measured / c.predicted:.3f}" if c.predicted and c.measured is not None else ""
            shown = ["" if v is None else f"{number(v)} {c.unit}".strip() for v in (c.predicted, c.measured)]
            rows.append([c.label, (shown[0], "n"), (shown[1], "n"), (ratio, "n")])
        if rows:
            head: list[Cell] = [run.name, ("predicted", "n"), ("measured", "n"), ("measured ÷ predicted", "n")]
            out.append(table(head, rows))
    return "".join(out)


def _told(event: Mapping[str, Any]) -> str:
    """An event in words."""
    kind = str(event.get("event", ""))
    if kind == "start":
        begun = f"started after step {event.get('step')}" if event.get("step") else "started"
        where = f" on {event['host']}, {event.get('ranks', '?')} ranks, {event.get('layout', '')}"
        return begun + (where if "host" in event else "")
    if kind in ("straggler", "straggler_over"):
        who = f"rank {event.get('rank')} on {event.get('host')} ({event.get('coords')})"
        how = f"{event.get('score')} times its peers" if kind == "straggler" else "as fast as the others again"
        return f"{who}: {how}"
    return str(event.get("reason") or event.get("message") or event.get("signal") or kind)


def event_table(runs: Sequence[RunData]) -> str:
    """Starts, ends, anomalies, stragglers and the rest, in the order of time."""
    rows: list[tuple[float, list[Cell], bool]] = []
    for run in runs:
        for e in run.events:
            when = float(e["time"]) if isinstance(e.get("time"), (int, float)) else 0.0
            clock = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(when))
            kind, step = (str(e.get("event", "")), "kind"), (str(e.get("step", "")), "n")
            row: list[Cell] = [kind, clock, step, (_told(e), "wide")]
            rows.append((when, [run.name, *row] if len(runs) > 1 else row, e.get("event") in BAD_EVENTS))
    if not rows:
        return '<p class="soft">None were recorded.</p>'
    rows.sort(key=lambda r: r[0])
    shown = rows if len(rows) <= MOST_EVENT_ROWS else rows[:MOST_EVENT_ROWS // 2] + rows[-MOST_EVENT_ROWS // 2:]
    head: list[Cell] = [*(["run"] if len(runs) > 1 else []), "event", "time (UTC)", ("step", "n"), ""]
    left = f'<p class="soft">{len(rows) - len(shown)} in between are not shown.</p>' if len(shown) < len(rows) else ""
    return table(head, [r[1] for r in shown], bad=[r[2] for r in shown]) + left


def _configuration(runs: Sequence[RunData]) -> str:
    parts = []
    if len(runs) > 1:
        keys = sorted({k for r in runs for k in r.config} - {"name"})
        different = [k for k in keys if len({repr(r.config.get(k)) for r in runs}) > 1]
        if different:
            rows: list[list[Cell]] = [[k, *[(str(r.config.get(k, "")), "wide") for r in runs]] for k in different]
            parts.append(table(["differs", *[r.name for r in runs]], rows))
        else:
            parts.append('<p class="soft">The configurations are equal.</p>')
    for run in runs:
        if run.config_text:
            parts.append(fold(f"{run.name}: config.toml, whole", f"<pre>{escape(run.config_text)}</pre>"))
    return "".join(parts) or '<p class="soft">No config.toml.</p>'


def _environment(runs: Sequence[RunData]) -> str:
    rows: list[list[Cell]] = []
    keys = ("commit", "command", "host", "system", "cpus", "device", "ranks", "layout", "launcher", "attempt")
    for key in keys:
        if any(key in r.environment for r in runs):
            rows.append([key, *[(str(r.environment.get(key, "")), "wide") for r in runs]])
    packages = sorted({p for r in runs for p in r.environment.get("versions", {})})
    rows += [[p, *[str(r.environment.get("versions", {}).get(p, "")) for r in runs]] for p in packages]
    if not rows:
        return '<p class="soft">No environment.json: the run is of an older version.</p>'
    parts = [table(["", *[r.name for r in runs]], rows)]
    for run in runs:
        if run.environment.get("providers"):
            shown = f"<pre>{escape(str(run.environment['providers']))}</pre>"
            parts.append(fold(f"{run.name}: provider of each op", shown))
    return "".join(parts)
