"""The pictures of a plan as inline SVG, each from the planner's own objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_port.core.io.numbers import number, ticks
from megatron_port.core.pipeline.actions import Kind, Span
from megatron_port.tools.charts.page import Bar as GanttBar
from megatron_port.tools.charts.page import colour, drawing, gantt, legend, line, rectangle, text
from megatron_port.tools.plan.case import Case, Machine
from megatron_port.tools.plan.memory import StageMemory
from megatron_port.tools.plan.search import Candidate
from megatron_port.tools.plan.sensitivity import Bar
from megatron_port.tools.plan.step import StepPlan, chunk_costs, exchanges_of
from megatron_port.tools.plan.timeline import replay

HATCH = (
    '<defs><pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="7" height="7" style="fill:var(--paper)"/><line x1="0" y1="0" x2="0" y2="7" class="hatch"/>'
    "</pattern></defs>"
)


def heat_map(found: Sequence[Candidate], case: Case, machine: Machine) -> str:
    """tp × pp: the best planned layout of each pair, by its model rate; pairs of which none fits are hatched.

    ``found``: ``search`` with ``keep_unfit``. The pair of the run is framed.
    """
    best: dict[tuple[int, int], Candidate] = {}
    for c in found:
        pair = (c.case.tp, c.case.pp)
        rank = (c.fits(machine), c.step.model_tflops)
        if pair not in best or rank > (best[pair].fits(machine), best[pair].step.model_tflops):
            best[pair] = c
    rows, columns = sorted({t for t, _ in best}), sorted({p for _, p in best})
    rates = [c.step.model_tflops for c in best.values() if c.fits(machine)] or [0.0]
    low, high = min(rates), max(rates)
    wide = max(42.0, min(74.0, 860 / max(len(columns), 1)))
    tall, left, top = 44.0, 66.0, 14.0
    out = [HATCH]
    for i, tp in enumerate(rows):
        y = top + i * tall
        out.append(text(left - 10, y + tall / 2 + 4, f"tp {tp}", anchor="end", kind="axis"))
        for j, pp in enumerate(columns):
            if (tp, pp) in best:
                frame = (tp, pp) == (case.tp, case.pp)
                out.append(_cell(best[(tp, pp)], machine, left + j * wide, y, wide, tall, (low, high), frame))
    foot = top + len(rows) * tall
    out += [text(left + (j + 0.5) * wide, foot + 17, f"pp {pp}", anchor="middle", kind="axis")
            for j, pp in enumerate(columns)]
    width = left + len(columns) * wide + 10
    note = [("does not fit (GB over)", "url(#hatch)"), ("slow", "color-mix(in srgb, var(--heat) 10%, var(--paper))"),
            ("fast (model TFLOP/s per device)", "var(--heat)")]
    swatches, height = legend(left, foot + 42, note, max(width - left, 420))
    return drawing(max(width, 500), foot + 36 + height, [*out, swatches], "best planned rate of every tp and pp")


def _cell(
    c: Candidate, machine: Machine, x: float, y: float, wide: float, tall: float, reach: tuple[float, float],
    frame: bool,
) -> str:
    low, high = reach
    over = (c.memory.total - machine.cluster.memory_gb * 1e9) / 1e9
    title = (
        f"{c.case.label()}: {c.step.seconds:.4g} s, {c.step.model_tflops:.4g} model TFLOP/s per device, "
        f"{c.memory.total / 1e9:.1f} GB"
    )
    edge = 'stroke-width="2.5" class="frame"' if frame else 'class="cell"'
    if not c.fits(machine):
        shown, ink = f"+{over:.0f}", "axis"
        body = rectangle(x + 1, y + 1, wide - 2, tall - 2, "url(#hatch)", title=title, more=edge)
    else:
        share = 0.1 + 0.9 * ((c.step.model_tflops - low) / (high - low) if high > low else 1.0)
        fill = f"color-mix(in srgb, var(--heat) {100 * share:.0f}%, var(--paper))"
        shown, ink = f"{c.step.model_tflops:.1f}" if high < 1000 else number(c.step.model_tflops), "strong"
        ink = "onheat" if share > 0.55 else ink
        body = rectangle(x + 1, y + 1, wide - 2, tall - 2, fill, title=title, more=edge)
    return body + text(x + wide / 2, y + tall / 2 + 4, shown, anchor="middle", kind=ink)


def memory_bars(stages: Sequence[StageMemory], limit: float) -> str:
    """Bytes of a rank by stage, stacked by part, against what a device has."""
    width, height, left, top = 900.0, 300.0, 58.0, 18.0
    right, foot = width - 16, height - 34
    high = 1.08 * max(limit, *(m.total for m in stages))
    names = [n for n in stages[0].parts() if any(m.parts()[n] > 1e-3 * high for m in stages)]

    def level(size: float) -> float:
        return foot - (foot - top) * size / high

    out = []
    for value in ticks(0, high / 1e9):
        out += [line(left, level(value * 1e9), right, level(value * 1e9)),
                text(left - 6, level(value * 1e9) + 4, number(value), anchor="end", kind="axis")]
    each = (right - left) / len(stages)
    for i, m in enumerate(stages):
        base = 0.0
        x, bar = left + i * each + each * 0.12, each * 0.76
        whole = f"stage {m.stage}: {m.total / 1e9:.2f} GB at {m.peak_at}"
        for k, name in enumerate(names):
            size = m.parts()[name]
            out.append(rectangle(x, level(base + size), min(bar, 60), level(base) - level(base + size), colour(k),
                                 title=f"{whole}; {name} {size / 1e9:.2f} GB"))
            base += size
        if len(stages) <= 32 or i % (len(stages) // 16) == 0:
            out.append(text(x + min(bar, 60) / 2, foot + 15, str(m.stage), anchor="middle", kind="axis"))
    out += [line(left, level(limit), right, level(limit), "limit"),
            text(right, level(limit) - 5, f"a device has {limit / 1e9:g} GB", anchor="end", kind="small"),
            text((left + right) / 2, height - 4, "pipeline stage", anchor="middle", kind="axis"),
            text(14, (top + foot) / 2, "GB per rank", anchor="middle", kind="axis", rotate=-90)]
    swatches, extra = legend(left, height + 16, [(n, colour(k)) for k, n in enumerate(names)], right - left)
    return drawing(width, height + extra + 10, [*out, swatches], "memory of a rank by pipeline stage")


def waterfall(step: StepPlan) -> str:
    """Return where the seconds of a step go, one after the other."""
    parts = [(n, s) for n, s in step.split.parts().items() if s > 0] + [("step", step.seconds)]
    width, each, left = 900.0, 30.0, 92.0
    right = width - 150
    scale = (right - left) / step.seconds
    out, at = [], 0.0
    for i, (name, seconds) in enumerate(parts):
        y = 10 + i * each
        start = 0.0 if name == "step" else at
        fill = "var(--total)" if name == "step" else colour(i)
        out += [text(left - 8, y + 16, name, anchor="end", kind="axis"),
                rectangle(left + start * scale, y + 3, seconds * scale, each - 10, fill),
                text(left + (start + seconds) * scale + 8, y + 16, f"{seconds:.4g} s, {seconds / step.seconds:.1%}",
                     kind="small")]
        if name != "step":
            at += seconds
            out.append(line(left + at * scale, y + 3, left + at * scale, y + each + 3, "grid"))
    return drawing(width, 16 + len(parts) * each, out, "seconds of a step by cause")


PASSES = {
    Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.INPUT: "gradient of the input",
    Kind.WEIGHT: "gradient of the weights",
}


def passes(case: Case, machine: Machine, *, micro_batches: int | None = None) -> list[list[Span]]:
    """Every pass of a step of ``case`` (with fewer ``micro_batches``: of a shorter one) by stage, in seconds.

    The schedule's order is replayed with the planned times. Transfers are left out: a pass may start when its
    neighbour's has ended.
    """
    costs = chunk_costs(case, machine)
    return replay(
        case.schedule, case.pp, [c.passes[0] for c in costs], [c.passes[1] for c in costs],
        micro_batches=micro_batches or case.micro_batches, exchanges=exchanges_of(case, costs),
    )


def pipeline_picture(stages: Sequence[Sequence[Span]], case: Case) -> str:
    """Passes of each stage over time; forward light, backward dark (a weight's part between), a colour each chunk. What
    a weight pass does beside the exchanges of a forward pass is at the foot of that."""
    width, each, left = 900.0, min(26.0, 420 / case.pp), 62.0
    span = max(s.end for row in stages for s in row)
    scale = (width - left - 16) / span
    rows = [
        [bar for one in row for bar in (_bar(one, stage, case), *_beside(one, stage, case))]
        for stage, row in enumerate(stages)
    ]
    out = gantt(rows, left=left, top=8, scale=scale, each=each, span=span, names=[f"stage {s}" for s in range(case.pp)])
    foot = 8 + case.pp * each
    for value in ticks(0, span, 7):
        out.append(text(left + value * scale, foot + 15, f"{number(value)} s", anchor="middle", kind="axis"))
    names = [("forward", f"color-mix(in srgb, {colour(0)} 45%, var(--paper))"), ("backward", colour(0)),
             ("waits", "var(--idle)")]
    names += [(f"chunk {k}", colour(k)) for k in range(1, case.vp)]
    swatches, extra = legend(left, foot + 36, names, width - left - 16)
    return drawing(width, foot + 28 + extra, [*out, swatches], "passes of every pipeline stage over time")


def _beside(span: Span, stage: int, case: Case) -> list[GanttBar]:
    """The bar of what a weight pass does beside the pass before it, which ends where its own turn begins."""
    if not span.beside:
        return []
    bar = _bar(span, stage, case)
    return [replace(bar, start=span.start - span.beside, end=span.start, mark="", tall=0.4)]


def _bar(span: Span, stage: int, case: Case) -> GanttBar:
    action = span.action
    share = {Kind.FORWARD: 45, Kind.WEIGHT: 75}.get(action.kind, 100)
    ink = colour(action.chunk)
    words = f"{PASSES[action.kind]} of micro-batch {action.micro_batch}, stage {stage}"
    words += f", chunk {action.chunk}" if case.vp > 1 else ""
    if span.beside:
        words += f", {span.beside:.4g} s of it beside the exchanges of the pass before"
    return GanttBar(
        span.start, span.end, ink if share == 100 else f"color-mix(in srgb, {ink} {share}%, var(--paper))",
        mark=str(action.micro_batch), title=f"{words}: {span.start:.4g} to {span.end:.4g} s",
        kind="cellmark" if action.kind is Kind.FORWARD else "onheat",
    )


def tornado(bars: Sequence[Bar], *, label: str, count: int = 9) -> str:
    """Relative change of the time for a smaller and a larger value of each number."""
    bars = list(bars)[:count]
    width, each, left = 480.0, 30.0, 172.0
    if not bars:
        return drawing(width, 40, [text(10, 24, "nothing changes the time by as much as 0.01 %")], label)
    reach = max(b.reach for b in bars) or 1.0
    middle, scale = (left + width - 20) / 2, (width - 20 - left) / 2 / reach * 0.44
    out = [line(middle, 4, middle, 10 + len(bars) * each, "rule")]
    for i, b in enumerate(bars):
        y = 8 + i * each
        out.append(text(left - 8, y + 16, b.name, anchor="end", kind="axis"))
        same_side = b.low is not None and b.high is not None and (b.low < 0) == (b.high < 0)
        for k, (value, words) in enumerate(((b.low, b.low_label), (b.high, b.high_label))):
            if value is None:
                continue
            x, down = middle + min(value, 0) * scale, 10.0 * k if same_side else 0.0
            title = f"{b.name} {words}: {value:+.2%}"
            thick = 9.0 if same_side else 19.0
            out.append(rectangle(x, y + 3 + down, abs(value) * scale, thick, colour(k), title=title))
            end, anchor = (x - 4, "end") if value < 0 else (middle + value * scale + 4, "start")
            out.append(text(end, y + (11 + down if same_side else 16), f"{words} {value:+.1%}", anchor=anchor,
                            kind="small"))
    return drawing(width, 16 + len(bars) * each, out, label)
