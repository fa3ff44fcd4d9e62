"""``plan --report``: a plan as one HTML file with inline SVG; no network, no script, light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.pipeline.schedules import Kind, Span
from megatron_port.ext.telemetry.flops import counted
from megatron_port.ext.telemetry.numbers import number, ticks
from megatron_port.tools.charts.page import (
    Axis,
    Series,
    colour,
    columns,
    drawing,
    gantt,
    legend,
    line,
    line_chart,
    page,
    rectangle,
    section,
    text,
)
from megatron_port.tools.charts.page import Bar as GanttBar
from megatron_port.tools.plan.case import Case, Machine, balanced_split
from megatron_port.tools.plan.compare import RATIO, Planned, Study, planned, studies
from megatron_port.tools.plan.memory import StageMemory
from megatron_port.tools.plan.search import RECOMPUTE, Candidate, options_of, search
from megatron_port.tools.plan.step import StepPlan, chunk_costs, exchanges_of, plan_step, replay
from megatron_port.tools.plan.text import Plan, best, explain, hours, render, span

# How the planned step answers when one number of the machine, or one choice of the layout, is another.

SHARE = 0.2
RATES = {
    "matmul rate": ("matmul_tflops", "attention_forward_tflops", "attention_backward_tflops", "fp8_matmul_tflops"),
    "memory bandwidth": ("memory_bandwidth_gb",),
    "links within a node": ("node_gb", "package_gb"),
    "network adapters": ("nic_gb",),
    "network out of a group": ("group_taper",),
    "latency within a node": ("node_latency_us",),
    "latency between nodes": ("network_latency_us",),
    "kernel launch": ("launch_us",),
    "jitter": ("jitter",),
}
"""Bar of the tornado → fields of the hardware that change together."""
CHOICES = {
    "micro-batch": "micro_batch", "tensor parallel size": "tp", "pipeline stages": "pp", "recompute": "recompute",
    "sequence parallel": "sequence_parallel", "expert parallel size": "ep",
}
"""Name of a bar → the field of the layout that changes."""


@dataclass(frozen=True)
class Bar:
    """One row of a tornado: relative change of the step's time."""

    name: str
    low: float | None
    """With the smaller value; None: there is no such layout, or it does not fit."""
    high: float | None
    low_label: str = ""
    high_label: str = ""

    @property
    def reach(self) -> float:
        """The larger of the two, by size."""
        return max((abs(x) for x in (self.low, self.high) if x is not None), default=0.0)


def machine_bars(case: Case, machine: Machine) -> list[Bar]:
    """Each rate and latency ``SHARE`` lower and higher (the case's layout kept), largest first."""
    now = plan_step(case, machine).seconds
    out = []
    for name, names in RATES.items():
        changes = []
        for factor in (1 - SHARE, 1 + SHARE):
            values = {n: getattr(machine.hardware, n) * factor for n in names}
            if "group_taper" in values:
                values["group_taper"] = min(1.0, values["group_taper"])
            other = replace(machine, hardware=replace(machine.hardware, **values))
            changes.append(plan_step(case, other).seconds / now - 1)
        out.append(Bar(name, changes[0], changes[1], f"−{SHARE:.0%}", f"+{SHARE:.0%}"))
    return sorted((b for b in out if b.reach > 5e-5), key=lambda b: -b.reach)


def choice_bars(case: Case, machine: Machine, found: Sequence[Candidate]) -> list[Bar]:
    """Each choice of the layout one step down and up, on the same devices and for the same batch; largest first.

    ``found``: the planned layouts (``search`` with ``keep_unfit``); a neighbour that does not fit has no bar.
    """
    now = plan_step(case, machine).seconds
    fitting = [c.case for c in found if c.fits(machine)]
    out = []
    for name, field in CHOICES.items():
        value = partial(_value, field=field)
        others = [c for c in fitting if _alike(c, case, field)]
        below = max((c for c in others if value(c) < value(case)), key=value, default=None)
        above = min((c for c in others if value(c) > value(case)), key=value, default=None)
        bar = [None if c is None else plan_step(c, machine).seconds / now - 1 for c in (below, above)]
        words = ["" if c is None else _shown(c, field) for c in (below, above)]
        out.append(Bar(name, bar[0], bar[1], words[0], words[1]))
    half, double = (_replicas(case, machine, factor) for factor in (0.5, 2.0))
    out.append(Bar("devices (node-hours)", half, double, "half", "double"))
    return sorted((b for b in out if b.low is not None or b.high is not None), key=lambda b: -b.reach)


def _value(case: Case, field: str) -> int:
    """Return a choice as a number, to tell the next smaller from the next larger."""
    value = getattr(case, field)
    return RECOMPUTE.index(value) if field == "recompute" else int(value)


def _shown(case: Case, field: str) -> str:
    value = getattr(case, field)
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{field} {value}" if field in ("tp", "pp", "ep") else str(value)


def _alike(other: Case, case: Case, field: str) -> bool:
    """Return whether two layouts differ at most in ``field``; at tp 1 there is no sequence parallelism to compare."""
    fields = {"tp", "pp", "vp", "micro_batch", "recompute", "sequence_parallel", "ep"} - {field}
    if field == "tp" and other.tp == 1:
        fields.remove("sequence_parallel")
    return all(getattr(other, f) == getattr(case, f) for f in fields)


def _replicas(case: Case, machine: Machine, factor: float) -> float | None:
    """Change of device-seconds per step with more or fewer replicas, the batch kept; None where it does not divide."""
    dp = case.dp * factor
    unit = int(dp) * case.micro_batch
    if dp < 1 or dp != math.floor(dp) or case.global_batch % unit:
        return None
    other = replace(case, dp=int(dp), micro_batches=case.global_batch // unit,
                    split=case.split or balanced_split(case.model, case.pp * case.vp))
    return plan_step(other, machine).seconds * factor / plan_step(case, machine).seconds - 1


# The pictures of a plan as inline SVG, each from the planner's own objects.

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


OBSERVED = ("tensor", "micro-batches", "stages", "ratio", "attention", "attention-math")
SHOWN_STAGES, SHOWN_MICRO_BATCHES = 16, 12
"""Limits of the pipeline's picture: beyond them, passes are too small to be seen."""


def study_picture(
    study: Study, found: Sequence[Planned], measured: Sequence[tuple[float, float, float]] | None = None
) -> str:
    """One study: rate per device (scaling: efficiency) over its x; hollow points do not fit the device.

    ``measured``: points beside the planned ones, (x, hardware TFLOP/s per device, fraction of the first).
    """
    scaling = study.name in ("weak", "strong")
    points = [(p.x, p.efficiency if scaling else p.tflops) for p in found]
    hollow = [not p.fits for p in found]
    series = [Series("planned", points, dots=True, hollow=hollow, dashed=measured is not None)]
    if measured is not None:
        rates = [(x, share if scaling else rate) for x, rate, share in measured]
        series.append(Series("measured", rates, 1, dots=True))
    y = Axis("of the smallest", lambda v: f"{100 * v:.4g} %", least=0.8) if scaling else \
        Axis("hardware TFLOP/s per device", least=0.0)
    body = line_chart(series, label=study.title, x=Axis(study.x_label, log=2), y=y, width=460)
    return f"<div><h3>{escape(study.title)}</h3><p>{escape(study.says)}</p>{body}</div>"


def report_page(config: RunConfig, plan: Plan) -> str:
    """The page of a plan."""
    case, machine = plan.case, plan.machine
    options = options_of(config, case)
    found = search(case, machine, options, keep_unfit=True)
    verdict = ("good", "fits") if plan.fits else ("bad", "does not fit")
    head = [
        f"<h1>{escape(plan.name)}: {counted(case.model, case.fine_tuning)} on {case.world} "
        f"{escape(machine.cluster.device_label)}s of {escape(machine.cluster.name)}</h1>",
        f'<p><b class="{verdict[0]}">{verdict[1]}</b> · {escape(case.label())} · {plan.step.seconds:.4g} s per step · '
        f"model {plan.step.model_tflops:.4g} TFLOP/s per device (MFU {plan.step.mfu:.1%}), hardware "
        f"{plan.step.hardware_tflops:.4g} (HFU {plan.step.hfu:.1%}) · {span(plan.budget.days)}, "
        f"{hours(plan.budget.node_hours)} node-hours for {plan.budget.tokens:.4g} tokens</p>",
        *(f"<p>{escape(line.strip())}</p>" for line in best(plan)[:2]),
    ]
    devices = max(4 * case.world, machine.cluster.gpus_per_node)
    made = {s.name: (s, planned(s, machine)) for s in studies(case, devices=devices, tensor=options.tensor)}
    scaling = [study_picture(*made[n]) for n in ("weak", "strong") if n in made]
    observed = [study_picture(*made[n]) for n in OBSERVED if n in made]
    body = [
        *head,
        section("Layouts", f"The best of every tensor and pipeline parallel size on {case.world} devices for a batch "
                f"of {case.global_batch}; micro-batch, recompute and sequence parallelism by the planner. The "
                "run's own pair is framed.", _wide(heat_map(found, case, machine))),
        section("Memory by stage", "Of one rank at its peak, against what a device has.",
                _wide(memory_bars(plan.memory, plan.limit))),
        section("Time of a step", "On the busiest stage; the parts add up.", _wide(waterfall(plan.step))),
        *_pipeline(plan),
        section("Scaling", "Planned, more or fewer replicas of this layout; hollow points do not fit.",
                columns(scaling)) if scaling else "",
        section("What the time hangs on", f"Change of the step's time: left, a rate of the machine {SHARE:.0%} lower "
                "or higher; right, one choice of the layout the next smaller or larger that fits (devices: their "
                "product with the time).", columns([
                    f"<div><h3>the machine</h3>{tornado(machine_bars(case, machine), label='the machine')}</div>",
                    f"<div><h3>the layout</h3>{tornado(choice_bars(case, machine, found), label='the layout')}</div>",
                ])),
        section("The paper's observations, by the planner", "Dash et al., arXiv 2312.12705, III.1 to III.4 and "
                f"FlashAttention, for this model on this cluster (up to {devices:,} devices; the fixed ratio: {RATIO} "
                "micro-batches a stage). "
                "Hollow points do not fit.", columns(observed)) if observed else "",
        section("In words", "As the command prints it.",
                f"<pre>{escape(render(plan))}\n\n{escape(explain(plan))}</pre>"),
    ]
    return page(f"plan of {plan.name}", "".join(body))


def _wide(picture: str) -> str:
    """A picture that scrolls where the window is too narrow for its words."""
    return f'<div class="scroll">{picture}</div>'


def _pipeline(plan: Plan) -> list[str]:
    case = plan.case
    if case.pp == 1:
        return []
    shown = case
    if case.pp > SHOWN_STAGES:  # the same layers a stage, fewer stages
        keep = SHOWN_STAGES
        split = (*case.chunks[: keep - 1], case.chunks[-1]) if case.vp == 1 else case.chunks[: keep * case.vp]
        shown = replace(case, pp=keep, split=split)
    count = min(case.micro_batches, max(SHOWN_MICRO_BATCHES, shown.pp + 4))
    count -= count % shown.pp if case.vp > 1 and count > shown.pp else 0
    words = f"{case.schedule}, {count} of {case.micro_batches} micro-batches"
    words += f", {shown.pp} of {case.pp} stages" if shown.pp < case.pp else ""
    found = passes(shown, plan.machine, micro_batches=count)
    return [section("Pipeline", f"{words}; transfers left out. The bubble shrinks as micro-batches are added.",
                    _wide(pipeline_picture(found, shown)))]
