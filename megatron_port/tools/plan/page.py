"""``plan --report``: a plan as one HTML file with inline SVG; no network, no script, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.model.flops import counted
from megatron_port.tools.charts.lines import Axis, Series, line_chart
from megatron_port.tools.charts.page import columns, page, section
from megatron_port.tools.plan.pictures import heat_map, memory_bars, passes, pipeline_picture, tornado, waterfall
from megatron_port.tools.plan.search import options_of, search
from megatron_port.tools.plan.sensitivity import SHARE, choice_bars, machine_bars
from megatron_port.tools.plan.studies import RATIO, Planned, Study, planned, studies
from megatron_port.tools.plan.text import best, explain, hours, render, span
from megatron_port.tools.plan.verdict import Plan

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
